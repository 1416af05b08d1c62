"""A command that is forked is what a command that is started would be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_start import WarmPython

SHOWS = """
import os, sys, tempfile
print(sys.argv[1:], os.getcwd(), sorted(os.environ), __name__)
print(sys.stdin.read(), tempfile.gettempdir(), sys.flags.optimize)
print("warned", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    made = WarmPython()
    yield made
    made.close()


def here(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), "OWN": "1"}


def test_words_folder_environment_streams_and_exit_code(warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    command = [sys.executable, "-m", "shows", "7", "b c"]
    asked = {"cwd": tmp_path, "env": here(tmp_path), "timeout": 60.0}
    expected = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **asked)  # type: ignore[call-overload]
    for _ in range(3):
        found = warm.run_module("shows", ["7", "b c"], tmp_path, here(tmp_path), 60)
        assert (found.returncode, found.stdout, found.stderr) == (7, expected.stdout, "warned\n")


def test_nothing_of_the_project_is_there_before_and_hashes_differ(warm: WarmPython, tmp_path: Path) -> None:
    text = "import sys; print([n for n in sys.modules if n.startswith('infir2')], hash('abc'))"
    (tmp_path / "looks.py").write_text(text)
    found = [warm.run_module("looks", [], tmp_path, here(tmp_path), 60).stdout for _ in range(2)]
    assert all(line.startswith("[] ") for line in found) and found[0] != found[1]


def test_one_that_takes_too_long_and_what_it_leaves_behind_are_killed(warm: WarmPython, tmp_path: Path) -> None:
    sleeper = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
    )
    (tmp_path / "leaves.py").write_text(sleeper)
    (tmp_path / "hangs.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    for module in ("leaves", "hangs"):
        with pytest.raises(subprocess.TimeoutExpired) as late:
            warm.run_module(module, [], tmp_path, here(tmp_path), 1.5)
        if module == "leaves":
            time.sleep(0.1)
            state = Path(f"/proc/{int(str(late.value.output))}/stat")
            assert not state.exists() or state.read_text().split()[2] == "Z"
    (tmp_path / "says.py").write_text("print('still there')")
    assert warm.run_module("says", [], tmp_path, here(tmp_path), 60).stdout == "still there\n"


def test_a_death_is_not_taken_for_an_answer(warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os; os.kill(os.getppid(), 9)")
    with pytest.raises(ValueError):
        warm.run_module("dies", [], tmp_path, here(tmp_path), 60)
    (tmp_path / "dies.py").write_text("import os; os.kill(os.getpid(), 9)")
    for _ in range(2):
        assert warm.run_module("dies", [], tmp_path, here(tmp_path), 60).returncode == -9


def test_an_environment_that_python_reads_when_it_starts_is_left_to_a_start(warm: WarmPython) -> None:
    assert warm.fits({**os.environ, "PYTHONPATH": "x", "HF_ENDPOINT": "y"})
    for name in ("OMP_NUM_THREADS", "PYTHONUTF8", "LD_PRELOAD", "TMPDIR"):
        assert not warm.fits({**os.environ, name: "3"})
