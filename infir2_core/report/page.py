"""report.html: one run on one page that can be mailed around. Pictures are inside, nothing is fetched from anywhere.

Drawn anew from the run folder each time; nothing reads it back.
"""

from __future__ import annotations

import base64
import html
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import STOPPED, InputError
from ..runs import Attempt, Run, Summary, attempts, read_run, summarise
from ..train.manifest import check_sizes, read_manifest
from ..train.metrics import SAMPLES, read_metrics
from .compare import flat_settings, folder_size
from .curves import png

FILE = "report.html"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4; }
td { white-space: pre-wrap; }
th { font-weight: 600; } img { width: 100%; } code { font-size: .9em; } .quiet { color: #666; } .bad { color: #b03000; }
"""


def write_page(run_dir: Path) -> Path:
    """Write RUN/report.html and return its path.

    Raises:
        InputError: the run's settings or metrics are damaged, or the page cannot be written.
    """
    run, path = read_run(run_dir), run_dir / FILE
    aside = path.with_suffix(".html.tmp")
    try:
        aside.write_text(page(run), "utf-8")
        aside.rename(path)
    except OSError as error:
        raise InputError(f"the report cannot be written: {error.strerror}", str(path)) from error
    return path


def page(run: Run) -> str:
    """The page as HTML text."""
    summary = summarise(run.path)
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        f"<h1>{html.escape(run.name)}</h1>",
        f'<p class="quiet">{html.escape(_headline(summary))}. Page drawn {written}.</p>',
        "<h2>Result</h2>",
        html_table([], _results(summary)),
    ]
    if run.steps:
        for axis in ("steps", "tokens"):
            picture = base64.b64encode(png([run], axis)).decode()
            parts.append(f'<img alt="curves over {axis}" src="data:image/png;base64,{picture}">')
    parts += ["<h2>Held-out loss</h2>", _evals(run)]
    if answers := read_metrics(run.path, SAMPLES):
        parts += ["<h2>Answers at the last evaluation</h2>", _answers(answers)]
    parts += ["<h2>Checkpoints</h2>", _checkpoints(run)]
    parts += ["<h2>Starts</h2>", _attempts(attempts(run.path))]
    settings = [[key, str(value)] for key, value in flat_settings(run).items()]
    parts += ["<h2>Settings</h2>", html_table(["key", "value"], settings)]
    title = html.escape(run.name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _headline(summary: Summary) -> str:
    return (
        f"{summary.stage} of size {summary.size} with recipe {summary.recipe}: {summary.status}, "
        f"step {summary.steps_done} of {summary.steps_planned}"
    )


def _results(summary: Summary) -> list[list[str]]:
    rows = [
        ["training loss, last step", _number(summary.loss, ".4f")],
        ["held-out loss, last", _number(summary.eval_loss, ".4f")],
        ["tokens", f"{summary.tokens:,}"],
        ["throughput, median", _number(summary.tok_per_s, ",.0f", " tokens/s")],
        ["memory, peak", _number(summary.memory_gb, ".2f", " GB")],
        ["steps skipped (not finite)", str(summary.skipped)],
    ]
    if summary.trained_share is not None:
        rows.append(["tokens that were trained", _number(summary.trained_share, ".1%")])
        rows.append(["padding", _number(summary.padding_share, ".2%")])
    return [*rows, ["problem", summary.problem]] if summary.problem else rows


def _evals(run: Run) -> str:
    rows = [[str(r["step"]), f"{r.get('tokens') or 0:,}", _number(r.get("loss"), ".4f")] for r in run.evals]
    return html_table(["step", "tokens", "loss"], rows[-20:]) if rows else '<p class="quiet">Not evaluated.</p>'


def _answers(records: list[dict[str, Any]]) -> str:
    last = [r for r in records if r["step"] == records[-1]["step"]]
    return html_table(["prompt", "answer", "end"], [[r["prompt"], r["completion"], r["finish"]] for r in last])


def _checkpoints(run: Run) -> str:
    rows = []
    for path in run.checkpoints:
        try:
            content = read_manifest(path)
            check_sizes(path, content)
            state = f"complete, written by {content['world']} rank(s)"
        except InputError as error:
            state = error.what
        rows.append([path.name, f"{folder_size(path) / 1e9:.3f} GB", state])
    return html_table(["folder", "size", "state"], rows) if rows else '<p class="quiet">None.</p>'


def _attempts(tries: list[Attempt]) -> str:
    meaning = {0: "done", STOPPED: "stopped on request", None: "died without a word, or still running"}
    rows = [
        [str(attempt.number), meaning.get(attempt.exit_code, f"exit code {attempt.exit_code}"), attempt.what]
        for attempt in tries
    ]
    return html_table(["start", "end", ""], rows) if rows else '<p class="quiet">Not noted.</p>'


def _number(value: Any, form: str, unit: str = "") -> str:
    return "not measured" if value is None else f"{value:{form}}{unit}"


def html_table(head: list[str], rows: list[list[str]]) -> str:
    """An HTML table of plain text; `head` may be empty."""
    lines = [f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>"] if head else []
    lines += [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"
