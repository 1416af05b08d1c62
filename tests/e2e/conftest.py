"""A small corpus of real text, prepared once for all end-to-end tests, and a `cpt` command short enough to repeat."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY = ["--size", "tiny", "--seq-len", 64, "--global-batch", 4, "--micro-batch", 2, "--lr", 1e-3, "--eval-iters", 1]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, run_cli: Callable[..., Any]) -> Path:
    """Prefix of about 1 MB of the standard library's sources in bytes."""
    prefix = tmp_path_factory.mktemp("corpus") / "stdlib"
    done = run_cli(
        "data", "prepare", "python-stdlib", "--out", prefix, "--tokenizer", "byte", "--limit-mb", 1, cold=True
    )
    assert done.returncode == 0, done.stderr
    return prefix


Train = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def train(run_cli: Callable[..., Any], corpus: Path, tmp_path: Path) -> Train:
    """`train("--steps", 8, name="a")`: a tiny run in tmp_path/runs; later options override the defaults."""

    def start(*options: object, name: str = "run", **keywords: Any) -> subprocess.CompletedProcess[str]:
        data = [] if "--data" in options else ["--data", corpus]
        where = ["--runs", tmp_path / "runs", "--name", name, "--device", "cpu"]
        done: subprocess.CompletedProcess[str] = run_cli(
            "cpt", *TINY, *data, *where, *options, cwd=tmp_path, **keywords
        )
        return done

    return start


def metrics(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    """Lines of one kind, without what a clock or a machine decides."""
    volatile = {"time", "tok_per_s", "tflops", "step_ms", "memory_gb"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in volatile} for line in lines if line["kind"] == kind]
