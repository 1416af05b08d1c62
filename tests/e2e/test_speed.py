"""The one speed that is promised on a CPU, as a ratio of interleaved steps: FP8 by reference against float32."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from step_time import measure


def test_a_tiny_infir2_step_takes_at_most_two_and_a_half_fp32_steps() -> None:
    fp32, infir2 = measure("tiny", ["fp32", "infir2"], "cpu", seq_len=256, rows=8, rounds=7)
    assert infir2["step_ms"] <= 2.5 * fp32["step_ms"], (fp32, infir2)
