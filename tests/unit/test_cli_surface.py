"""The command line as a contract: which commands and options exist, how fast it answers, what a typo gets.

`cli_surface.txt` lists every command and option. A change of it is a change users see, so it is made on purpose:

    python tests/unit/test_cli_surface.py > tests/unit/cli_surface.txt

and named in CHANGELOG.md.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

SURFACE = Path(__file__).with_name("cli_surface.txt")
# pydantic is not among them: Typer imports it to convert arguments.
HEAVY = ("torch", "numpy", "megatron", "transformers", "matplotlib", "jinja2", "pyarrow")


def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below `command`, itself included, with the words that reach it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


def surface() -> list[str]:
    """One line for each command and each of its options and arguments, sorted."""
    from infir2_cli.main import app

    lines = []
    for path, command in walk(typer.main.get_command(app), ("infir2",)):
        words = " ".join(path)
        lines.append(words)
        for parameter in command.params:
            is_option = parameter.opts[0].startswith("-")
            names = "/".join((*parameter.opts, *parameter.secondary_opts)) if is_option else parameter.metavar
            names = names or (parameter.name or "").upper()
            lines.append(f"{words} {names}{' (required)' if parameter.required else ''}")
    return sorted(lines)


def test_every_command_and_option_is_the_frozen_one() -> None:
    assert surface() == SURFACE.read_text(encoding="utf-8").splitlines(), (
        "if that was meant: python tests/unit/test_cli_surface.py > tests/unit/cli_surface.txt"
    )


def test_every_command_takes_json_and_debug_and_says_what_it_does() -> None:
    from infir2_cli.main import app

    for path, command in walk(typer.main.get_command(app), ("infir2",)):
        assert command.help, f"{' '.join(path)} has no help"
        if not hasattr(command, "commands"):
            options = {name for parameter in command.params for name in parameter.opts}
            assert {"--json", "--debug"} <= options, " ".join(path)
            for parameter in command.params:
                assert parameter.help, f"{' '.join(path)} {parameter.name} has no help"


def test_help_answers_within_0_4_seconds() -> None:
    best = min(_seconds() for _ in range(5))
    assert best < 0.4


def _seconds() -> float:
    """Of the processor, which is what it takes on a machine that does nothing else."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "infir2_cli", "--help"], check=True, capture_output=True, cwd=_root())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _root() -> Path:
    return Path(__file__).resolve().parents[2]


def test_help_of_every_command_imports_nothing_heavy() -> None:
    from infir2_cli.main import app

    code = (
        "import json, sys\n"
        "from infir2_cli.main import main\n"
        "sys.argv = ['infir2', *json.loads(sys.argv[1]), '--help']\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))\n"
    )
    for path, command in walk(typer.main.get_command(app), ()):
        if hasattr(command, "commands") or not path:
            continue
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(path)], check=True, capture_output=True, text=True, cwd=_root()
        )
        assert json.loads(done.stdout.splitlines()[-1]) == [], path


@pytest.mark.parametrize(
    ("words", "what", "near"),
    [
        (["ctp"], "no such command: ctp", "cpt"),
        (["env", "chekc"], "no such command: chekc", "check"),
        (["runs", "comprae"], "no such command: comprae", "compare"),
        (["init", "--siez", "tiny"], "no such option: --siez", "--size"),
        (["--versoin"], "no such option: --versoin", "--version"),
    ],
)
def test_a_typo_exits_2_with_the_nearest_valid_word(words: list[str], what: str, near: str, run_cli: Any) -> None:
    done = run_cli(*words)
    assert done.returncode == 2
    assert f"error: {what}" in done.stderr and f"Did you mean '{near}'?" in done.stderr
    assert done.stdout == ""
    done = run_cli(*words, "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["what"] == what and near in error["hint"] and error["exit_code"] == 2


def test_version_is_the_package_version(run_cli: Any) -> None:
    from infir2_core import __version__

    done = run_cli("--version")
    assert (done.returncode, done.stdout) == (0, f"infir2 {__version__}\n")


@pytest.mark.parametrize(
    ("words", "code"),
    [("--version", 0), ("init --dry-run", 0), ("init --dry-run --json", 0), ("init --size x --json", 2)],
)
def test_a_reader_that_leaves_early_changes_nothing(words: str, code: int) -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m infir2_cli {words} | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        cwd=_root(),
    )
    assert (done.returncode, done.stderr) == (code, "")


if __name__ == "__main__":
    sys.path.insert(0, str(_root()))
    print("\n".join(surface()))
