"""`infir2 cpt` as a user types it: a run, its folder, resuming, stopping, decaying, damage, divergence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, metrics

from infir2_core.config.schema import ModelShape
from infir2_core.model.decoder import Decoder
from infir2_core.model.hf import save_hf
from infir2_core.precision.recipe import load_recipe
from infir2_core.train.checkpoint import CheckpointStore

Train = Callable[..., "subprocess.CompletedProcess[str]"]


def newest(run: Path) -> Any:
    store = CheckpointStore(run / "checkpoints")
    path, _ = store.newest()
    assert path is not None
    return store.load(path)


def test_a_run_its_folder_and_the_same_command_again(train: Train, tmp_path: Path) -> None:
    options = ["--steps", 12, "--recipe", "infir2", "--eval-every", 5, "--save-every", 6]
    first = train(*options)
    assert first.returncode == 0, first.stderr
    run = tmp_path / "runs" / "run"
    assert "new run run" in first.stdout and "tail -f" in first.stdout
    for expected in ("e4m3 1x128 pow2 x e4m3 128x128 pow2", "12 fprop", "12 wgrad", "head  bf16 x bf16"):
        assert expected in first.stdout, first.stdout
    names = {"config.toml", "recipe.json", "metrics.jsonl", "checkpoints", "tensorboard", "logs"}
    assert names <= {p.name for p in run.iterdir()}
    assert json.loads((run / "recipe.json").read_text())["hash"] == load_recipe("infir2").hash
    steps, evals = metrics(run), metrics(run, "eval")
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["step"] for line in evals] == [0, 5, 10, 12]
    assert steps[0]["lr"] == 0.0 and steps[-1]["tokens"] == 12 * 4 * 64
    assert evals[-1]["loss"] < evals[0]["loss"], "it learns"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000006", "step-00000012"]
    again = train(*options)
    assert again.returncode == 0 and "resuming run at step 12" in again.stdout and "complete" in again.stdout
    assert metrics(run) == steps
    other = train(*options, "--new")
    assert other.returncode == 0 and "new run run-2" in other.stdout
    assert metrics(tmp_path / "runs" / "run-2") == steps, "the same settings and seed give the same bits"


@pytest.mark.parametrize(
    "recipe",
    ["bf16", "fp32", "infir2-lean", "infir2-fp32-scales", "fp8-current", "fp8-delayed", "fp8-rowwise", "mxfp8"],
)
def test_every_recipe_trains(train: Train, tmp_path: Path, recipe: str) -> None:
    done = train("--steps", 6, "--recipe", recipe, "--eval-every", 6, "--save-every", 6)
    assert done.returncode == 0, done.stderr
    evals = metrics(tmp_path / "runs" / "run", "eval")
    assert evals[-1]["loss"] < evals[0]["loss"]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGUSR1", "file"])
def test_a_requested_stop_saves_and_exits_75(corpus: Path, train: Train, tmp_path: Path, how: str) -> None:
    run = tmp_path / "runs" / "run"
    options = ["--steps", 4000, "--save-every", 4000, "--eval-every", 0, "--recipe", "bf16"]
    arguments = [*TINY, "--data", corpus, "--runs", tmp_path / "runs", "--name", "run", "--device", "cpu", *options]
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-m", "infir2_cli", "cpt", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    (run / "stop").touch() if how == "file" else process.send_signal(getattr(signal, how))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    saved = newest(run)
    assert saved.step == metrics(run)[-1]["step"] < 4000
    assert f"stopped at step {saved.step}" in out
    assert not (run / "stop").exists()


def test_decay_from_a_stable_checkpoint_equals_the_run_that_decays_itself(train: Train, tmp_path: Path) -> None:
    shared = ["--recipe", "fp8-delayed", "--eval-every", 0, "--save-every", 10, "--keep-every", 10, "--decay-steps", 10]
    whole = train("--steps", 30, "--warmup-steps", 5, *shared, name="whole")
    assert whole.returncode == 0, whole.stderr
    # The checkpoint at step 20 goes when the decay is done, so it is taken from a run that was stopped before.
    stable = train(
        "--steps",
        30,
        "--warmup-steps",
        5,
        *shared,
        name="stable",
        env={"INFIR2_FAULT": "kill:save:after-rename@step=20"},
    )
    assert stable.returncode == -9
    checkpoint = tmp_path / "runs" / "stable" / "checkpoints" / "step-00000020"
    assert checkpoint.is_dir()
    decay = train("--phase", "decay", "--load", checkpoint, "--steps", 10, *shared, name="decay")
    assert decay.returncode == 0, decay.stderr
    a, b = (newest(tmp_path / "runs" / name) for name in ("whole", "decay"))
    assert (a.step, b.step) == (30, 10)
    assert a.state["position"]["samples"] == b.state["position"]["samples"]
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name
    assert [line["lr"] for line in metrics(tmp_path / "runs" / "whole")][20:] == [
        line["lr"] for line in metrics(tmp_path / "runs" / "decay")
    ]


def test_a_decay_run_resumes_when_its_parent_has_retired_the_checkpoint(train: Train, tmp_path: Path) -> None:
    shared = ["--recipe", "bf16", "--eval-every", 0, "--save-every", 4]
    assert train("--steps", 8, "--decay-steps", 2, *shared, name="parent").returncode == 0
    checkpoint = tmp_path / "runs" / "parent" / "checkpoints" / "step-00000004"
    decay = ["--phase", "decay", "--load", checkpoint, "--steps", 8, *shared]
    assert train(*decay, name="decay").returncode == 0
    before = metrics(tmp_path / "runs" / "decay")
    shutil.rmtree(tmp_path / "runs" / "decay" / "checkpoints" / "step-00000008")
    shutil.rmtree(checkpoint)
    again = train(*decay, name="decay")
    assert again.returncode == 0 and "resuming decay at step 4" in again.stdout, again.stderr
    assert metrics(tmp_path / "runs" / "decay") == before


@pytest.mark.parametrize("damage", ["flip", "truncate", "no-manifest"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    train: Train, tmp_path: Path, damage: str
) -> None:
    options = ["--recipe", "bf16", "--eval-every", 0, "--save-every", 4, "--steps", 8]
    assert train(*options).returncode == 0
    run = tmp_path / "runs" / "run"
    before = metrics(run)
    shard = run / "checkpoints" / "step-00000008" / "rank-00000.safetensors"
    if damage == "flip":
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        (shard.parent / "manifest.json").unlink()
    again = train(*options)
    assert again.returncode == 0
    assert (
        "step-00000008" in again.stdout and "passed over" in again.stdout and "resuming run at step 4" in again.stdout
    )
    assert metrics(run) == before


def test_non_finite_steps_are_skipped_and_logged(train: Train, tmp_path: Path) -> None:
    done = train(
        "--steps", 8, "--recipe", "infir2", "--eval-every", 8, env={"INFIR2_FAULT": "nan:layers.1.down@step=3-4"}
    )
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path / "runs" / "run")
    assert [line["step"] for line in lines if line["skipped"]] == [3, 4]
    assert lines[-1]["tokens"] == 6 * 4 * 64
    assert "step 3: the gradient was not finite" in done.stdout


@pytest.mark.parametrize(
    "fault,recipe,extra,culprit",
    [
        ("nan:layers.1.down", "infir2", ["--recompute", "full"], "the output of layers.1.down"),
        ("nan:layers.0", "bf16", ["--recompute", "selective"], "the output of layers.0"),
        ("nan-grad:layers.1.qkv", "bf16", [], "the backward pass of layers.1.qkv"),
        ("inf:layers.2.gate_up", "infir2", [], "the output of layers.2.gate_up"),
    ],
)
def test_the_layer_is_named_in_every_direction(
    train: Train, fault: str, recipe: str, extra: list[str], culprit: str
) -> None:
    done = train("--steps", 9, "--recipe", recipe, "--max-skips", 1, *extra, env={"INFIR2_FAULT": f"{fault}@step=3-99"})
    assert done.returncode == 5, done.stderr
    assert f"the trouble begins in {culprit}" in done.stderr


def test_too_many_in_a_row_end_the_run_and_name_the_layer(train: Train, tmp_path: Path) -> None:
    done = train(
        "--steps", 20, "--recipe", "bf16", "--max-skips", 2, env={"INFIR2_FAULT": "nan:layers.1.down@step=5-99"}
    )
    assert done.returncode == 5, done.stderr
    assert "3 steps in a row" in done.stderr and "the output of layers.1.down" in done.stderr
    assert list((tmp_path / "runs" / "run" / "faults").glob("step-00000007.rank-0.safetensors"))
    exits = json.loads((tmp_path / "runs" / "run" / "logs" / "attempt-1" / "rank-0.exit.json").read_text())
    assert exits["exit_code"] == 5


TINY_SHAPE = ModelShape(
    layers=3, hidden=256, ffn=768, heads=4, kv_heads=2, head_dim=64, vocab=260, tied=True, max_positions=2048
)


def test_continuing_from_a_hugging_face_folder(train: Train, tmp_path: Path) -> None:
    """Weights of a trained run, exported: step 0 scores what the run ended with, and untrained weights are refused."""
    options = ["--recipe", "bf16", "--eval-every", 20]
    assert train("--steps", 40, *options, name="first").returncode == 0
    model = Decoder(TINY_SHAPE, load_recipe("bf16"))
    saved = newest(tmp_path / "runs" / "first")
    with torch.no_grad():
        for name, view in model.hf_views().items():
            view.copy_(saved.tensors[f"model/{name}"])
    save_hf(model, tmp_path / "hf")
    done = train("--from", tmp_path / "hf", "--steps", 4, *options, name="next")
    assert done.returncode == 0, done.stderr
    end, start = metrics(tmp_path / "runs" / "first", "eval")[-1], metrics(tmp_path / "runs" / "next", "eval")[0]
    assert start["step"] == 0 and start["loss"] == pytest.approx(end["loss"], abs=0.02)
    model.initialise(0.02, seed=1)
    shutil.rmtree(tmp_path / "hf")
    save_hf(model, tmp_path / "hf")
    refused = train("--from", tmp_path / "hf", "--steps", 4, *options, name="untrained")
    assert refused.returncode == 3
    assert "ln(vocabulary)" in refused.stderr and "--skip-load-check" in refused.stderr
    allowed = train("--from", tmp_path / "hf", "--steps", 4, *options, "--skip-load-check", name="allowed")
    assert allowed.returncode == 0, allowed.stderr


@pytest.mark.parametrize("recipe,mean", [("fp32", 1e-5), ("fp8-delayed", 3e-3), ("infir2-lean", 1e-2)])
def test_two_ranks_train_as_one(train: Train, tmp_path: Path, recipe: str, mean: float) -> None:
    """Delayed scaling needs the amax of all ranks: each sees only its own microbatches.

    In FP8 the last bit of a sum moves codes sooner or later, and infir2-lean rounds gradients with bits that depend on
    the rank: over texts and seeds a single loss differs by up to 5 %, the mean of 20 by up to 0.3 %.
    """
    options = ["--steps", 20, "--recipe", recipe, "--eval-every", 20, "--save-every", 20]
    for ranks, name in ((1, "one"), (2, "two")):
        done = train(*options, "--ranks", ranks, name=name)
        assert done.returncode == 0, done.stderr + done.stdout
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    for a, b in list(zip(one, two, strict=True))[:2]:
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), a["step"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3), a["step"]
    assert sum(b["loss"] for b in two) == pytest.approx(sum(a["loss"] for a in one), rel=mean)
    if recipe == "fp8-delayed":
        histories = [newest(tmp_path / "runs" / name).tensors for name in ("one", "two")]
        for key in (k for k in histories[0] if k.endswith("amax_history")):
            first = [history[key][15:20] for history in histories]  # steps 5 to 1: the newest stands in front
            assert torch.allclose(*first, rtol=0.01) and first[0].all(), key
    # A checkpoint of two ranks goes on with one.
    further = train(*options, "--ranks", 1, name="two")
    assert further.returncode == 0 and "resuming two at step 20" in further.stdout


def test_a_stop_during_start_up_still_ends_with_75(corpus: Path, tmp_path: Path) -> None:
    """The signal comes while torch is being imported; the run then goes on from step 0 as if it had just begun."""
    options = [
        "--steps",
        3,
        "--eval-every",
        3,
        "--recipe",
        "bf16",
        "--data",
        corpus,
        "--runs",
        tmp_path,
        "--name",
        "run",
    ]
    command = [sys.executable, "-m", "infir2_cli", "cpt", *map(str, TINY), *map(str, options), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "follow it" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and "stopped at step 0" in out, out
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert [line["step"] for line in metrics(tmp_path / "run", "eval")] == [0, 3]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]


def test_json_and_dry_run(train: Train, tmp_path: Path) -> None:
    plan = train("--steps", 5, "--dry-run", "--json")
    assert plan.returncode == 0, plan.stderr
    data = json.loads(plan.stdout)
    assert data["config"]["cpt"]["steps"] == 5 and data["plan"]["tokens"] == 5 * 4 * 64
    assert not (tmp_path / "runs").exists()
    done = train("--steps", 5, "--json")
    result = json.loads(done.stdout)
    assert result["step"] == 5 and result["stopped"] is None and result["loss"] > 0
