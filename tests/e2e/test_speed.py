"""The one speed that is promised on a CPU, as a ratio of interleaved steps: FP8 by reference against float32."""

from __future__ import annotations

import statistics

from infir2_core.bench.arm import ArmSpec, measure


def test_a_tiny_infir2_step_takes_at_most_two_and_a_half_fp32_steps() -> None:
    times: dict[str, list[float]] = {"fp32": [], "infir2": []}
    for _ in range(3):
        for recipe, found in times.items():
            arm = measure(ArmSpec("tiny", recipe, seq_len=256, rows=8, warmup=1, steps=3, device="cpu"))
            found += [sum(phases) for phases in zip(*arm.ms.values(), strict=True)]
    assert statistics.median(times["infir2"]) <= 2.5 * statistics.median(times["fp32"]), times
