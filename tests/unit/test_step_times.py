"""The time a step is charged, on a device that works behind the host: a simulated one, whose clock the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scratch import scratch_config

from infir2_core.engines.native import Moment, PendingStep
from infir2_core.engines.ranks import Ranks
from infir2_core.precision.recipe import load_recipe
from infir2_core.train.feed import Share
from infir2_core.train.loop import Run
from infir2_core.train.stop import StopRequest

RATE = 1000.0  # tokens that the device does in a second
SHORT = {"warmup_steps": 0, "decay_steps": 0, "eval_every": 4, "save_every": 1000}
FEED = 0.02  # seconds that the host needs for a batch


class Device:
    """Seconds of the host, and until when the device has work."""

    now, busy = 0.0, 0.0


def event_of(device: Device) -> type:
    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(device.now, device.busy)

        def synchronize(self) -> None:
            device.now = max(device.now, self.at)

        def elapsed_time(self, later: Any) -> float:
            assert device.now >= max(self.at, later.at)  # a real event that has not passed raises
            return 1e3 * float(later.at - self.at)

    return Event


class Engine:
    """Takes as long as its tokens need; its queue holds a tenth of a step, then the host must wait."""

    model = None

    def __init__(self, device: Device, tokens: list[int]) -> None:
        self.device, self.tokens = device, iter(tokens)

    def moment(self) -> Moment:
        return Moment(True)

    def train_step(self, batches: Any, lr: float) -> PendingStep:
        device, seconds = self.device, next(self.tokens) / RATE
        device.busy = max(device.busy, device.now) + seconds
        device.now = max(device.now, device.busy - 0.1 * seconds)
        return PendingStep(torch.ones(5, dtype=torch.float64), self.moment())


class Records:
    """Of the steps, as a watcher gets them, who takes `watching` seconds over each."""

    def __init__(self, device: Device, watching: float) -> None:
        self.steps: list[dict[str, Any]] = []
        self.device, self.watching = device, watching

    def note(self, text: str) -> None:
        pass

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record)
        self.device.now += self.watching


class Store:
    """Of no checkpoints."""

    def wait(self) -> None:
        pass

    def retire(self, done: bool) -> None:
        pass


class Feed:
    """Batches of so many tokens, which take the host a while to make."""

    train_samples = 7

    def __init__(self, device: Device, tokens: list[int]) -> None:
        self.device, self.tokens = device, tokens

    def step(self, samples: int) -> Share:
        self.device.now += FEED
        return Share([], 1, self.tokens[samples], 0, 128.0)


def charged(folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: list[int], watching: float = 0.0) -> list[float]:
    """Seconds that a run charges its steps; a validation of 30 s lies behind the fourth."""
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", event_of(device))
    config = scratch_config("tiny", **SHORT, steps=len(tokens))
    records = Records(device, watching)
    run = Run(config, load_recipe("bf16"), folder, Ranks(), records, StopRequest(folder))  # type: ignore[arg-type]
    run.engine, run.feed, run.store = Engine(device, tokens), Feed(device, tokens), Store()  # type: ignore[assignment]
    monkeypatch.setattr("infir2_core.train.loop.NativeEngine", lambda *_: run.engine)
    monkeypatch.setattr("infir2_core.train.loop.CheckpointStore", lambda *_: run.store)
    monkeypatch.setattr("infir2_core.train.loop.open_feed", lambda *_: run.feed)
    monkeypatch.setattr("infir2_core.train.loop.plant_nan", lambda *_: None)
    monkeypatch.setattr(run, "_restore", lambda: True)
    monkeypatch.setattr(run, "_prove_precision", lambda: None)
    monkeypatch.setattr(run, "_save", lambda: None)

    def validation(_log: Any) -> None:
        device.now += 30.0 if run.position.step == 4 else 0.0

    monkeypatch.setattr(run, "_evaluate", validation)
    began = device.now
    run.train()
    assert len(records.steps) == len(tokens)
    seconds = [record["step_ms"] / 1e3 for record in records.steps]
    for record, took, count in zip(records.steps, seconds, tokens, strict=True):
        assert record["tok_per_s"] == pytest.approx(count / took, rel=1e-3)
    # All of the time but the validation, and but what the watcher takes of it when the device has nothing left to do:
    # behind the steps that end a stretch, and beside the one before.
    spare = device.now - began - 30.0 - sum(seconds)
    assert -1e-6 <= spare <= 4 * watching + 1e-6
    return seconds


def test_each_step_is_charged_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [900, 100, 700, 50, 800, 40, 600]
    # The host is free to feed the next step when a tenth of this one is left; at the start, and behind the validation
    # after the fourth, the device has nothing to do meanwhile.
    left = [0.0 if number % 4 == 0 else 0.1 * tokens[number - 1] / RATE for number in range(len(tokens))]
    expected = [count / RATE + max(0.0, FEED - rest) for count, rest in zip(tokens, left, strict=True)]
    assert charged(tmp_path, monkeypatch, tokens) == pytest.approx(expected, abs=1e-6)


def test_a_device_that_waits_for_its_host_is_not_called_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = charged(tmp_path, monkeypatch, [100] * 8, watching=0.5)
    assert seconds[2:4] == pytest.approx([0.52, 0.52], abs=0.1) and seconds[6:] == pytest.approx([0.52, 0.52], abs=0.1)
