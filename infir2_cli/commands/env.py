"""`infir2 env check`: what this machine has, which recipes it runs and how, and whether the project's plan can run.

Reads only. Without a project file it reports and exits 0; with one it exits 4 when the plan cannot run here, naming the
reason and what to change. The judging is in infir2_core/doctor.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infir2_cli.output import DebugFlag, JsonFlag, emit, guarded, report_error, say, table
from infir2_core.errors import Infir2Error, MachineError

if TYPE_CHECKING:
    from infir2_core.config.project import ProjectFile
    from infir2_core.machine import Machine

app = typer.Typer(help="Check this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Check this machine."""  # without a callback Typer would fold this group of one command into `infir2 env`


@app.command("check")
@guarded
def check(
    project: Annotated[
        Path | None, typer.Option("--project", help="Project file to check; by default the infir2.toml above here.")
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show what this machine has, which recipes run here, and whether the project's plan can run."""
    from infir2_core.config.project import find_project, load_project
    from infir2_core.doctor import facts, verdicts
    from infir2_core.machine import probe

    path = project or find_project(Path.cwd())
    plan = load_project(path) if path else None
    machine = probe(plan.folder / plan.project.runs if plan else Path.cwd())
    rows, recipes = facts(machine), verdicts(machine)
    problems = _problems(plan, machine) if plan else []

    def human() -> None:
        _table("This machine", ["what", "found", "to fix"], [[r.name, r.found, r.fix] for r in rows])
        _table("Recipes", ["recipe", "runs", "why", "to fix"], [[r.recipe, r.runs, r.reason, r.fix] for r in recipes])
        if plan is None:
            say("No project file here, so no plan to check; infir2 init writes one.")
        elif not problems:
            say(f"The plan of {plan.path} can run here.", style="green")
        for problem in problems:
            report_error(problem)

    emit(
        {
            "machine": machine,
            "facts": rows,
            "recipes": recipes,
            "project": plan.path if plan else None,
            "problems": [{"what": p.what, "where": p.where, "hint": p.hint} for p in problems],
        },
        human,
    )
    if problems:
        raise SystemExit(MachineError.exit_code)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table whose last column is left out when nothing stands in it."""
    used = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
    table(title, columns[:used], [row[:used] for row in rows])


def _problems(plan: ProjectFile, machine: Machine) -> list[Infir2Error]:
    from infir2_core.config.presets import load_preset
    from infir2_core.doctor import plan_problems
    from infir2_core.errors import InputError

    if plan.model.size is None:
        raise InputError(
            "the project file names no size to check", plan.where("model.size"), 'size = "tiny" under [model]'
        )
    preset = load_preset(plan.model.size)
    recipe = plan.cpt.settings().get("recipe", preset.cpt.recipe)
    if recipe.endswith(".toml"):
        recipe = str(plan.folder / recipe)
    runs = plan.folder / plan.project.runs
    found = plan_problems(recipe, preset.size, preset.model.parameters, runs, machine)
    for problem in found:
        problem.where = plan.where(problem.where) if problem.where else str(plan.path)
    return found
