"""`infir2 runs`: list runs, show one, compare several. Reads run folders; writes only the picture or page asked for."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infir2_cli.output import DebugFlag, JsonFlag, emit, guarded, say, table

if TYPE_CHECKING:
    from infir2_core.report.compare import Comparison, Paired

app = typer.Typer(help="List, show and compare runs.", no_args_is_help=True)
RunsFlag = Annotated[Path | None, typer.Option("--runs", help="Folder of runs [default: the project's, else runs].")]


@app.command("list")
@guarded
def list_(runs: RunsFlag = None, json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """List all runs: how far, how good, how fast."""
    from infir2_core.runs import list_runs

    found = list_runs(_folder(runs))
    rows = []
    for run in found:
        progress, speed = f"{run.steps_done}/{run.steps_planned}", _number(run.tok_per_s, ",.0f")
        losses = [_number(run.loss, ".4f"), _number(run.eval_loss, ".4f")]
        rows.append([run.name, run.status, run.recipe, progress, *losses, f"{run.tokens:,}", speed])

    def human() -> None:
        if not rows:
            say("No runs yet. Start one: infir2 cpt --size tiny")
            return
        table("", ["run", "status", "recipe", "steps", "loss", "held-out", "tokens", "tok/s"], rows)
        for run in found:
            if run.problem:
                say(f"{run.name}: {run.problem}")

    emit([run.as_dict() for run in found], human)


@app.command("show")
@guarded
def show(
    name: Annotated[
        str | None, typer.Argument(help="Name, beginning of one, or path; default: the newest run.")
    ] = None,
    runs: RunsFlag = None,
    html: Annotated[bool, typer.Option("--html", help="Write report.html into the run folder.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show one run: result, settings, checkpoints, starts."""
    from infir2_core.report.compare import flat_settings
    from infir2_core.runs import attempts, latest_checkpoint, read_run, resolve_run, summarise

    run = read_run(resolve_run(name, _folder(runs)))
    summary, settings, latest = summarise(run.path).as_dict(), flat_settings(run), latest_checkpoint(run.path)
    starts = [{"number": a.number, "exit_code": a.exit_code, "what": a.what} for a in attempts(run.path)]
    page = None
    if html:
        from infir2_core.report.page import write_page

        page = write_page(run.path)

    def human() -> None:
        shown = summary | {"updated": datetime.fromtimestamp(summary["updated"]).isoformat(" ", "seconds")}
        table(run.name, ["", ""], [[key, _plain(value)] for key, value in shown.items() if value not in ("", None)])
        table("Settings", ["key", "value"], [[key, _plain(value)] for key, value in settings.items() if value != ""])
        for start in starts:
            say(f"Start {start['number']}: exit code {_plain(start['exit_code'])} {start['what']}".rstrip())
        say(f"Checkpoints: {', '.join(path.name for path in run.checkpoints) or 'none'}")
        say(f"Newest complete checkpoint: {latest or 'none'}")
        if page:
            say(f"Report: {page}")

    details = {"settings": settings, "starts": starts, "checkpoints": run.checkpoints}
    emit(summary | details | {"latest_checkpoint": latest, "report": page}, human)


@app.command("compare")
@guarded
def compare(
    names: Annotated[list[str], typer.Argument(help="The run to compare with, then one or more others.")],
    runs: RunsFlag = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the curves of all of them into this file.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="The picture's x axis counts tokens, not steps.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Compare runs: loss at equal steps, speed, memory, and what differs in their settings."""
    from infir2_core.report.compare import compare as compare_runs
    from infir2_core.runs import read_run, resolve_run

    folder = _folder(runs)
    chosen = [read_run(resolve_run(name, folder)) for name in names]
    result = compare_runs(chosen)
    if png is not None:
        from infir2_core.report.curves import write_png

        write_png(chosen, png, "tokens" if tokens else "steps")

    def human() -> None:
        _show(result)
        if png is not None:
            say(f"Picture: {png}")

    emit(result.as_dict() | {"png": png}, human)


def _show(result: Comparison) -> None:
    names = [result.base, *(other.name for other in result.against)]
    rows = []
    for row in result.losses:
        pairs = [f"{_number(row['train'][name], '.4f')} / {_number(row['eval'][name], '.4f')}" for name in names]
        rows.append([str(row["step"]), *pairs])
    table("Loss at equal steps: training (mean of the steps around) / held-out", ["step", *names], rows)
    for other in result.against:
        differing = [[key, _plain(left), _plain(right)] for key, (left, right) in other.settings.items()]
        table(f"Settings that differ: {other.name}", ["key", result.base, other.name], differing)
        speed, memory = _number(other.tok_per_s_ratio, ".3f"), _number(other.memory_ratio, ".3f")
        say(f"{other.name} against {result.base}:")
        for which, pair in (("all", other.every), ("last", other.last)):
            if pair is not None:
                say(f"  held-out loss, {which} {_paired(pair)}")
        say(f"  tokens/s ratio {speed}, memory ratio {memory}")


def _paired(pair: Paired) -> str:
    error = f" ± {pair.stderr:.3f}" if pair.stderr is not None else ""
    return f"{pair.count} evaluations: {pair.mean:+.5f} nats, {pair.relative:+.3f}{error} %"


def _folder(runs: Path | None) -> Path:
    from infir2_core.runs import default_runs_dir

    return runs if runs is not None else default_runs_dir(Path.cwd())


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _plain(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
