"""`infir2 bench` as a user types it on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("what a machine without a GPU says", allow_module_level=True)


def test_a_comparison_by_reference_and_its_baseline(run_cli, tmp_path: Path) -> None:
    command = ("bench", "bf16-vs-fp8", "--size", "tiny", "--layers", 1, "--seq-len", 128, "--rows", 1, "--reference")
    command += ("--steps", 2, "--turns", 1)
    done = run_cli(*command, "--accept", "--json", cwd=tmp_path, cold=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [row["name"] for row in data["rows"]] == ["bf16", "infir2"] and data["regressions"] == []
    assert data["rows"][1]["ratio"]["step"] > 0 and data["card"]["gpu"] is False
    assert all((tmp_path / path).stat().st_size > 0 for path in data["files"])
    (stored,) = (tmp_path / "benchmarks" / "baselines").glob("*.json")
    accepted = json.loads(stored.read_text())
    accepted["tiny-128x1-1layers"]["infir2"]["step"] = 0.01  # as if it had once been a hundred times faster
    stored.write_text(json.dumps(accepted))
    done = run_cli(*command, "--check", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "slower: infir2" in done.stdout and "bf16" in done.stdout
    done = run_cli(*command, "--check", "--baselines", "elsewhere", cwd=tmp_path)
    assert done.returncode == 3 and "no baseline was accepted" in done.stderr
    assert "infir2" in done.stdout and "written: " in done.stdout  # what was measured is not lost


@pytest.mark.parametrize("command", [("bench", "bf16-vs-fp8"), ("bench", "gemm")])
def test_without_fp8_units_it_says_so(run_cli, command: tuple[str, ...], tmp_path: Path) -> None:
    done = run_cli(*command, cwd=tmp_path)
    assert done.returncode == 4 and "FP8" in done.stderr and "--reference" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--size", "7b", "--reference"), 3, "tiny and small"),
        (("--size", "tiny", "--reference", "--recipes", "nvfp4"), 3, "cannot run"),
        (("--size", "tiny", "--reference", "--recipes", "infir3"), 3, "infir2"),
        (("--size", "tiny", "--reference", "--peer", "nemo"), 3, "megatron-te"),
        (("--size", "tiny", "--reference", "--peer", "megatron-te"), 4, "pip install 'infir2[megatron]'"),
        (("--size", "tiny", "--reference", "--recompute", "some"), 3, "recomputation"),
        (("--size", "tiny", "--steps", "0"), 2, "--steps"),
        (
            (
                "--size",
                "tiny",
                "--reference",
                "--check",
                "--steps",
                "1",
                "--turns",
                "1",
                "--seq-len",
                "16",
                "--layers",
                "1",
            ),
            3,
            "--accept",
        ),
    ],
)
def test_bad_input(run_cli, arguments: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    done = run_cli("bench", "bf16-vs-fp8", *arguments, cwd=tmp_path)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
