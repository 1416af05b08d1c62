"""metrics.jsonl stays standard JSON and, after kills and resumes, equals that of a run that was never interrupted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infir2_core.errors import InputError, MachineError
from infir2_core.train.metrics import MetricsLog, read_metrics


def record(step: int) -> dict[str, object]:
    return {"kind": "step", "step": step, "loss": 5.0 - step / 10, "tokens": step * 64, "skipped": False, "time": 1e9}


def play(run: Path, resume: int | None, until: int) -> None:
    """Train from `resume` to `until`: an eval at step 0 and at every third step, after the step's own line."""
    with MetricsLog(run, resume, tensorboard=False) as log:
        if resume is None:
            log.append({"kind": "eval", "step": 0, "loss": 6.0})
        for step in range((resume or 0) + 1, until + 1):
            log.append(record(step))
            if step % 3 == 0:
                log.append({"kind": "eval", "step": step, "loss": 6.0 - step})


@pytest.mark.parametrize("torn", [b"", b'{"kind": "step", "st', b'{"kind": "step", "step": 8}', b"\xff\x00"])
@pytest.mark.parametrize("resume", [None, 0, 3, 5, 6, 7])
def test_after_a_resume_the_log_is_that_of_an_uninterrupted_run(
    tmp_path: Path, resume: int | None, torn: bytes
) -> None:
    play(tmp_path / "straight", None, 10)
    play(tmp_path / "killed", None, 7)
    with (tmp_path / "killed" / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert [r["step"] for r in read_metrics(tmp_path / "killed") if r["kind"] == "step"] == list(range(1, 8))
    play(tmp_path / "killed", resume, 10)
    straight = (tmp_path / "straight" / "metrics.jsonl").read_bytes()
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == straight
    assert sorted(p.name for p in (tmp_path / "killed").iterdir()) == ["metrics.jsonl"]


def test_what_is_not_finite_becomes_null_and_is_named(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, None, tensorboard=False) as log:
        log.append(
            {
                "kind": "step",
                "step": 1,
                "loss": float("nan"),
                "grad_norm": torch.tensor(float("inf")),
                "lr": torch.tensor(0.5),
                "layers": {"q": [1.0, -math.inf]},
            }
        )
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert read_metrics(tmp_path) == [
        {
            "kind": "step",
            "step": 1,
            "loss": None,
            "grad_norm": None,
            "lr": 0.5,
            "layers": {"q": [1.0, None]},
            "nonfinite": ["loss", "grad_norm", "layers.q.1"],
        }
    ]


@pytest.mark.parametrize("bad", ["{torn", "[1]", '{"kind": "step"}', '{"kind": "step", "step": 2, "loss": NaN}', ""])
def test_a_damaged_line_is_named_by_file_and_number(tmp_path: Path, bad: str) -> None:
    good = json.dumps(record(1))
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{bad}\n{good}\n")
    for action in (lambda: read_metrics(tmp_path), lambda: MetricsLog(tmp_path, 5, tensorboard=False)):
        with pytest.raises(InputError, match="damaged") as caught:
            action()
        assert caught.value.where == f"{tmp_path / 'metrics.jsonl'}:2" and caught.value.exit_code == 3
    assert bad in (tmp_path / "metrics.jsonl").read_text()  # nothing is thrown away in silence


def test_no_metrics_yet_is_an_empty_list(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_lines_are_there_when_the_process_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from infir2_core.train.metrics import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]), None, tensorboard=False)\n"
        "log.append({'kind': 'step', 'step': 1}); log.append({'kind': 'step', 'step': 2})\n"
        "assert 'torch' not in sys.modules\n"  # `runs list` reads metrics and has to stay quick
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_a_full_disk_is_the_machines_fault() -> None:
    log = object.__new__(MetricsLog)
    log.path, log._writer, log._file = Path("/dev/full"), None, Path("/dev/full").open("a")
    with pytest.raises(MachineError, match="No space left"):
        log.append({"kind": "step", "step": 1})


def test_tensorboard_mirror_drops_what_the_resume_drops(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume, until, shift in ((None, 7, 0.0), (4, 9, 100.0)):
        with MetricsLog(tmp_path, resume) as log:
            assert log.note == ""
            for step in range((resume or 0) + 1, until + 1):
                log.append({"kind": "step", "step": step, "loss": step + shift, "time": 1e9 + step})
            log.append({"kind": "eval", "step": until, "loss": float("nan")})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 1), (2, 2), (3, 3), (4, 4), (5, 105), (6, 106), (7, 107), (8, 108), (9, 109),
    ]  # fmt: skip
    assert events.Tags()["scalars"] == ["train/loss"]


def test_without_tensorboard_the_log_works_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with MetricsLog(tmp_path, None) as log:
        log.append(record(1))
        assert "tensorboard" in log.note
    assert len(read_metrics(tmp_path)) == 1
