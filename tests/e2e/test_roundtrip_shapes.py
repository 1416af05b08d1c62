"""Real shapes there and back, bit for bit, in little memory: the embedding and two blocks of each size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["0.5b", "1.5b", "7b"])
def test_there_and_back_in_both_layouts(tmp_path: Path, size: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "roundtrip.py"), "--size", size, "--layers", "2"]
    done = subprocess.run(
        [*command, "--work", str(tmp_path / "w")], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for steps in (result, result["native"], result["megatron"]):
        for name, step in steps.items():
            if isinstance(step, dict) and "peak_gb" in step:
                assert step["peak_gb"] < 2.0, name  # the embedding of 7b alone has 1.1 GB
