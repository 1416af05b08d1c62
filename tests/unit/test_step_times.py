"""The time a step is charged, on a device that works behind the host: a simulated one, whose clock the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infir2_core.config.presets import load_preset
from infir2_core.config.schema import Blend, RunConfig, Source
from infir2_core.engines.native import Moment, PendingStep
from infir2_core.engines.ranks import Ranks
from infir2_core.precision.recipe import load_recipe
from infir2_core.train.feed import Share
from infir2_core.train.loop import Run
from infir2_core.train.stop import StopRequest

RATE = 1000.0  # tokens that the device does in a second


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
    """Of the steps, as a watcher gets them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record)


class Feed:
    """Batches of so many tokens, which take the host a while to make."""

    def __init__(self, device: Device, tokens: list[int]) -> None:
        self.device, self.tokens = device, tokens

    def step(self, samples: int) -> Share:
        self.device.now += 0.02
        return Share([], 1, self.tokens[samples], 0, 128.0)


def test_each_step_is_charged_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [900, 100, 700, 50, 800, 20, 600]
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", event_of(device))
    preset = load_preset("tiny")
    config = RunConfig(
        name="times",
        runs=str(tmp_path),
        size="tiny",
        model=preset.model,
        source=Source(kind="scratch"),
        data=[Blend(prefix="-", weight=1.0, content="")],
        cpt=preset.cpt,
    )
    records: Any = Records()
    run = Run(config, load_recipe("bf16"), tmp_path, Ranks(), records, StopRequest(tmp_path))
    run.engine, run.feed = Engine(device, tokens), Feed(device, tokens)  # type: ignore[assignment]
    before = None
    for number in range(len(tokens)):
        if number == 4:  # a validation: everything is settled, and the host is elsewhere for a while
            run._settle(before, None)
            device.now, before = device.now + 30.0, None
        queued = run._step()
        if before is not None:
            run._settle(before, None)
        before = queued
    run._settle(before, None)
    # The device waits for the feed at the start, behind the pause, and behind a step shorter than the feed's 20 ms.
    seconds = [record["step_ms"] / 1e3 for record in records.steps]
    expected = [count / RATE + (0.02 if number in (0, 4) else 0.0) for number, count in enumerate(tokens)]
    assert seconds == pytest.approx(expected, abs=0.021)
    assert [record["tok_per_s"] for record in records.steps][:4] == pytest.approx([RATE] * 4, rel=0.3)
    assert sum(seconds) == pytest.approx(device.now - 30.0, abs=0.05)
