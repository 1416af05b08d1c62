"""The `infir2` command: which commands exist, and what a wrong command line says.

Command modules import only Typer and `output` at their top, so that `infir2 --help` answers at once; torch, pydantic
and the rest are imported by the command that runs.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from infir2_cli import output
from infir2_cli.commands import (
    bench,
    cast_fp8,
    convert,
    cpt,
    data,
    env,
    generate,
    hub,
    init,
    presets,
    recipes,
    runs,
    sft,
)
from infir2_core import __version__
from infir2_core.errors import Infir2Error, UsageError, nearest


class Group(TyperGroup):
    """A group of commands that answers an unknown name with the nearest valid one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in self.commands:
            raise UsageError(f"no such command: {name}", ctx.command_path, nearest(name, self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="infir2",
    cls=Group,
    help="Train Qwen2.5-family language models in BF16 and FP8, from a laptop CPU to Hopper GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        output.say(f"infir2 {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options that belong to no command."""


app.command("init")(init.init)
app.command("cpt")(cpt.cpt)
app.command("sft")(sft.sft)
app.command("generate")(generate.generate)
app.command("cast-fp8")(cast_fp8.cast_fp8)
app.add_typer(convert.app, name="convert", cls=Group)
app.add_typer(env.app, name="env", cls=Group)
app.add_typer(data.app, name="data", cls=Group)
app.add_typer(presets.app, name="presets", cls=Group)
app.add_typer(recipes.app, name="recipes", cls=Group)
app.add_typer(runs.app, name="runs", cls=Group)
app.add_typer(hub.app, name="hub", cls=Group)
app.add_typer(bench.app, name="bench", cls=Group)


def _usage(error: typer.TyperException) -> UsageError:
    """Typer's complaint about the command line in our words, with the nearest valid option where one was misspelt."""
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "infir2"
    misspelt = getattr(error, "option_name", None)
    if misspelt and context:
        return UsageError(f"no such option: {misspelt}", where, nearest(misspelt, _options(context.command.params)))
    return UsageError(getattr(error, "format_message", lambda: str(error))(), where, f"{where} --help")


def _options(params: Iterable[Any]) -> list[str]:
    return [
        "--help",
        *(name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")),
    ]


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that is no text must not end a command
    try:
        result = app(prog_name="infir2", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except typer.Abort:
        sys.exit(output.INTERRUPTED)
    except (typer.TyperException, Infir2Error) as error:
        output.set_json_mode("--json" in sys.argv)
        known = error if isinstance(error, Infir2Error) else _usage(error)
        if known.what:  # empty when a bare `infir2` has just shown its help
            output.report_error(known)
        sys.exit(known.exit_code)
