"""A request to stop is a flag, seen between steps; handlers and the `stop` file are left as they should be."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from infir2_core.train.fault_points import VARIABLE, armed, fault_point
from infir2_core.train.stop import SIGNALS, StopRequest


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_the_flag_and_nothing_else(tmp_path: Path, number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in SIGNALS}
    with StopRequest(tmp_path) as stop:
        assert stop.requested() is None
        os.kill(os.getpid(), number)
        assert stop.requested() == number.name
    assert {n: signal.getsignal(n) for n in SIGNALS} == before


def test_the_reason_that_came_in_is_kept_when_more_follow(tmp_path: Path) -> None:
    with StopRequest(tmp_path) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested() == "SIGTERM"


def test_only_a_second_ctrl_c_interrupts(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopRequest(tmp_path) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested() == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second SIGINT was swallowed")
    assert signal.getsignal(signal.SIGINT) is before


def test_the_stop_file_is_removed_once_honoured(tmp_path: Path) -> None:
    with StopRequest(tmp_path) as stop:
        (tmp_path / "stop").touch()
        assert stop.requested() == f"file {tmp_path / 'stop'}"
        assert (tmp_path / "stop").exists()
    assert not (tmp_path / "stop").exists()
    with StopRequest(tmp_path) as stop:
        assert stop.requested() is None


def test_a_crash_leaves_the_request_standing(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    with pytest.raises(OSError), StopRequest(tmp_path) as stop:
        assert stop.requested()
        raise OSError("the save failed")
    assert (tmp_path / "stop").exists()


def test_a_stop_file_nobody_saw_stays_for_the_next_start(tmp_path: Path) -> None:
    with StopRequest(tmp_path):
        (tmp_path / "stop").touch()
    assert (tmp_path / "stop").exists()


def test_a_signal_during_a_blocking_call_is_seen_after_it(tmp_path: Path) -> None:
    with StopRequest(tmp_path) as stop:
        gate = threading.Event()
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        gate.wait(0.2)
        assert stop.requested() == "SIGTERM"


def test_fault_points_fire_only_where_and_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not armed("kill", "save:before-rename", 1)
    monkeypatch.setenv(VARIABLE, "nan:loss@step=3, kill:save:before-rename@step=20")
    assert armed("kill", "save:before-rename", 20) and armed("nan", "loss", 3)
    assert not armed("kill", "save:before-rename", 2) and not armed("kill", "save:after-rename", 20)
    monkeypatch.setenv(VARIABLE, "kill:here")
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    fault_point("there", 1)
    fault_point("here", 7)
    assert killed == [(os.getpid(), signal.SIGKILL)]
