"""The sink: one JSON document whatever happens, three-line errors, the right exit code, no traceback by accident."""

from __future__ import annotations

import errno
import json as json_module
from pathlib import Path

import pytest
import typer

from infir2_cli import output
from infir2_core.errors import DivergedError, Infir2Error, InputError, MachineError, UsageError


@output.guarded
def fail(error: BaseException, json: bool = False, debug: bool = False) -> None:
    output.say("working")
    raise error


@output.guarded
def show(data: object, json: bool = False, debug: bool = False) -> None:
    output.say("a line for people")
    output.table("title", ["[name]", "value"], [["[cpt]", "1"]])
    output.warn("careful")
    output.emit(data, lambda: output.say("the result"))  # type: ignore[arg-type]


CODES = [(UsageError, 2), (InputError, 3), (MachineError, 4), (DivergedError, 5), (Infir2Error, 1)]


@pytest.mark.parametrize(("kind", "code"), CODES)
def test_error_shows_what_where_and_hint_and_exits_with_its_code(
    kind: type[Infir2Error], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        fail(kind("unknown key 'stpes'", "infir2.toml:12", "Did you mean 'steps'?"))
    seen = capsys.readouterr()
    assert stop.value.code == code
    assert seen.err.splitlines() == [
        "error: unknown key 'stpes'",
        "where: infir2.toml:12",
        "hint:  Did you mean 'steps'?",
    ]
    assert "Traceback" not in seen.out + seen.err


@pytest.mark.parametrize(("kind", "code"), CODES)
def test_error_in_json_mode_is_the_only_thing_on_stdout(
    kind: type[Infir2Error], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        fail(kind("bad", "there", "do this"), json=True)
    assert stop.value.code == code
    assert json_module.loads(capsys.readouterr().out) == {
        "error": {"what": "bad", "where": "there", "hint": "do this", "exit_code": code}
    }


def test_a_long_message_stays_on_one_line_and_brackets_survive(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/a/" + "very-long-folder-name/" * 20 + "[cpt].toml"
    with pytest.raises(SystemExit):
        fail(InputError(f"no such file: {path}"))
    assert capsys.readouterr().err.splitlines() == [f"error: no such file: {path}"]


def test_anything_else_is_our_bug_with_a_traceback_only_on_debug(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        fail(ZeroDivisionError("oops"))
    quiet = capsys.readouterr()
    assert stop.value.code == 1
    assert "this is a bug of infir2: ZeroDivisionError: oops" in quiet.err
    assert "--debug" in quiet.err and "Traceback" not in quiet.err
    with pytest.raises(SystemExit):
        fail(ZeroDivisionError("oops"), debug=True)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.ENOSPC, 4, "no room left"),
        (errno.EFBIG, 4, "no room left"),
        (errno.EACCES, 3, "no permission"),
        (errno.EROFS, 3, "no permission"),
        (errno.ENOENT, 3, "no such file"),
        (errno.EBADF, 1, "bug of infir2"),
    ],
)
def test_system_errors_name_the_path(number: int, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        fail(OSError(number, "No such file or directory" if number == errno.ENOENT else "text", "/data/x.bin"))
    assert stop.value.code == code
    shown = capsys.readouterr().err
    assert words in shown and "/data/x.bin" in shown


def test_ctrl_c_exits_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        fail(KeyboardInterrupt())
    assert stop.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_typers_own_exits_pass_through() -> None:
    with pytest.raises(typer.Exit):
        fail(typer.Exit(75))
    with pytest.raises(typer.BadParameter):
        fail(typer.BadParameter("no"))


def test_people_see_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    show({"a": 1})
    seen = capsys.readouterr()
    assert seen.out.splitlines()[0] == "a line for people"
    assert "[cpt]" in seen.out and "[name]" in seen.out
    assert seen.out.splitlines()[-1] == "the result"
    assert seen.err == "warning: careful\n"


def test_json_is_one_document_and_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    show({"path": Path("a/b"), "loss": float("nan"), "many": [float("inf"), np.float32(0.5), (1, "é")]}, json=True)
    seen = capsys.readouterr()
    assert json_module.loads(seen.out) == {"path": "a/b", "loss": None, "many": [None, 0.5, [1, "é"]]}
    assert seen.err == "warning: careful\n"


def test_progress_goes_to_stderr_in_json_mode() -> None:
    import sys

    before = output.set_json_mode(True)
    try:
        assert output.console().file is sys.stderr
        output.set_json_mode(False)
        assert output.console().file is sys.stdout
    finally:
        output.set_json_mode(before)


def test_the_mode_of_one_command_does_not_leak_into_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    show([1], json=True)
    capsys.readouterr()
    show([1])
    assert capsys.readouterr().out.endswith("the result\n")


def test_ctrl_c_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    @output.guarded
    def command(json: bool) -> None:
        stop = KeyboardInterrupt()
        stop.add_note("the same command goes on")
        raise stop

    for json in (False, True):
        with pytest.raises(SystemExit) as ended:
            command(json=json)
        assert ended.value.code == output.INTERRUPTED
        said = capsys.readouterr()
        assert "the same command goes on" in (said.out if json else said.err)
