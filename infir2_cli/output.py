"""The one sink: everything a command shows goes through here.

People get plain lines and tables from rich; programs pass `--json` and get one JSON document on stdout, whatever
happens, with notes kept on stderr. Errors become three lines (what, where, what to type next) and an exit code in one
place, `guarded`. Text is printed as it is: no markup is interpreted, so `[cpt]` in a message stays `[cpt]`.

Nothing here knows a command, and no command prints by itself. rich is imported when something is first shown.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json as json_module
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import IO, TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from infir2_core.errors import NO_ROOM, Infir2Error, InputError, MachineError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
DebugFlag = Annotated[bool, typer.Option("--debug", help="Show the traceback when something goes wrong.")]

INTERRUPTED = 130  # what a shell reports for a program ended by ctrl-C
_WIDTH_WHEN_PIPED = 200  # rich would fold tables at 80 columns, which breaks grep
_json_mode = False


def console() -> Console:
    """The console for progress bars and other live output: stdout for people, stderr in `--json` mode."""
    return _console(stderr=_json_mode)


def _console(stderr: bool) -> Console:
    from rich.console import Console

    class Piped(Console):
        """When a reader leaves early (`| head`), rich would end the program; a training run must go on."""

        def on_broken_pipe(self) -> None:
            drop(stream)

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _WIDTH_WHEN_PIPED
    return Piped(file=stream, width=width, markup=False, highlight=False, emoji=False)


def json_mode() -> bool:
    """Whether the running command was given `--json`."""
    return _json_mode


def say(text: str, style: str = "") -> None:
    """Print one line for people; silent in `--json` mode. `style` is a rich style such as "bold" or "green"."""
    if not _json_mode:
        _console(stderr=False).print(text, style=style or None, soft_wrap=True)


def say_part(text: str) -> None:
    """Print text as it is, without an end of line, at once; silent in `--json` mode.

    A terminal does not get the control characters in it: text of a model must not move the cursor.
    """
    if _json_mode:
        return
    if sys.stdout.isatty():
        text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)


def in_colour() -> bool:
    """Whether what is said appears in colours: on a terminal, unless NO_COLOR is set."""
    shown = _console(stderr=False)
    return shown.color_system is not None and not shown.no_color


def paint(pieces: Sequence[tuple[str, str]]) -> None:
    """Print (text, style) pieces one after the other, and end the line; silent in `--json` mode."""
    if not _json_mode:
        from rich.text import Text

        _console(stderr=False).print(Text.assemble(*pieces), soft_wrap=True)


def warn(text: str) -> None:
    """Print one line to stderr, in both modes."""
    _console(stderr=True).print(f"warning: {text}", style="yellow", soft_wrap=True)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table for people; silent in `--json` mode. Every row has one cell for each column."""
    if _json_mode:
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(Text(column), overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    _console(stderr=False).print(drawn)


def emit(data: Mapping[str, Any] | Sequence[Any], human: Callable[[], None] | None = None) -> None:
    """Hand over a command's result: as one JSON document on stdout in `--json` mode, else by calling `human`.

    Paths become strings, pydantic models and dataclasses objects, NumPy scalars numbers, and non-finite numbers null,
    which JSON lacks.
    """
    if _json_mode:
        _print_json(data)
    elif human is not None:
        human()


def _print_json(data: Any) -> None:
    text = json_module.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        drop(sys.stdout)


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    elif hasattr(value, "item") and not isinstance(value, Mapping):
        value = value.item()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def report_error(error: Infir2Error) -> None:
    """Show an error: three lines on stderr for people, a JSON object on stdout in `--json` mode."""
    hint = error.hint.strip()
    if _json_mode:
        fields = {"what": error.what, "where": error.where, "hint": hint, "exit_code": error.exit_code}
        _print_json({"error": fields})
        return
    shown = _console(stderr=True)
    shown.print(f"error: {error.what}", style="bold red", soft_wrap=True)
    if error.where:
        shown.print(f"where: {error.where}", soft_wrap=True)
    if hint:
        shown.print(f"hint:  {hint}", soft_wrap=True)


def from_os_error(error: OSError) -> Infir2Error | None:
    """The user's error behind a failed system call (full disk, no permission, no such path); None for anything else."""
    where = str(error.filename) if error.filename else ""
    if error.errno in NO_ROOM:
        return MachineError(
            "no room left on the disk (or, by ulimit -f, in this file)",
            where,
            "free some space or choose another folder",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return InputError("no permission to read or write here", where, "choose a folder you own, or change its mode")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP):
        return InputError((error.strerror or "no such file").lower(), where, "check the path")
    return None


def set_json_mode(on: bool) -> bool:
    """Switch `--json` mode and return what it was."""
    global _json_mode
    before, _json_mode = _json_mode, on
    return before


def guarded(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command: set the output mode from its `json` argument and turn every failure into an exit code.

    An `Infir2Error` is shown in full and exits with its own code, ctrl-C exits 130, and anything else is a bug of ours:
    one line and exit code 1, with the traceback only when the command's `debug` argument is set.
    """

    @functools.wraps(fn)
    def command(*args: P.args, **kwargs: P.kwargs) -> R:
        before = set_json_mode(bool(kwargs.get("json", False)))
        try:
            return fn(*args, **kwargs)
        except KeyboardInterrupt as stop:
            hint = "; ".join(getattr(stop, "__notes__", []))
            if _json_mode:
                _print_json({"error": {"what": "interrupted", "where": "", "hint": hint, "exit_code": INTERRUPTED}})
            else:
                warn(f"interrupted; {hint}" if hint else "interrupted")
            raise SystemExit(INTERRUPTED) from None
        except Exception as error:
            if isinstance(error, typer.TyperException | typer.Exit | typer.Abort):
                raise  # Typer's own control flow
            known = (
                error
                if isinstance(error, Infir2Error)
                else from_os_error(error)
                if isinstance(error, OSError)
                else None
            )
            if known is None:
                known = Infir2Error(
                    f"this is a bug of infir2: {type(error).__name__}: {error}",
                    hint="run the same command with --debug and report the traceback",
                )
            if kwargs.get("debug", False):
                _console(stderr=True).print_exception()
            report_error(known)
            raise SystemExit(known.exit_code) from error
        finally:
            set_json_mode(before)

    return command


def drop(stream: IO[str]) -> None:
    """Send what is still to come on `stream` nowhere, because its reader went away."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
