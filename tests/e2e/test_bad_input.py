"""Bad input to `infir2 cpt`: exit code, what is wrong, where, and what to type next. Nothing is lost or half-made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from infir2_core.config.hf_config import shape_to_hf
from infir2_core.config.presets import load_preset

Train = Callable[..., "subprocess.CompletedProcess[str]"]


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Exit code, every word on stderr, no traceback."""
    assert done.returncode == code, done.stderr + done.stdout
    for word in words:
        assert word in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def copy_corpus(corpus: Path, folder: Path) -> Path:
    for path in corpus.parent.glob(corpus.name + ".*"):
        if path.is_file():
            shutil.copy(path, folder / path.name)
    return folder / corpus.name


def test_missing_and_empty_data(train: Train, tmp_path: Path) -> None:
    assert_refused(train("--data", ""), 3, "--data is empty")
    assert_refused(train("--data", tmp_path / "nowhere"), 3, "nowhere", "infir2 data prepare")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"empty{suffix}").touch()
    assert_refused(train("--data", tmp_path / "empty"), 3, "empty")
    assert not (tmp_path / "runs").exists()


def test_truncated_bin(train: Train, corpus: Path, tmp_path: Path) -> None:
    prefix = copy_corpus(corpus, tmp_path)
    content = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(content[:-1000])
    assert_refused(train("--data", prefix), 3, f"{prefix.name}.bin", "infir2 data prepare")


def test_tokenizer_with_more_ids_than_the_vocabulary(train: Train, corpus: Path, tmp_path: Path) -> None:
    prefix = copy_corpus(corpus, tmp_path)
    sidecar = prefix.with_suffix(".json")
    made = json.loads(sidecar.read_text())
    made["tokenizer"]["size"] = 50000
    sidecar.write_text(json.dumps(made))
    assert_refused(
        train("--data", prefix), 3, "50,000" if "50,000" in train("--data", prefix).stderr else "50000", "260"
    )


@pytest.mark.parametrize(
    "text,words",
    [
        ("format = 1\n[cpt]\nlearning_rate = 1e-3\n", ("infir2.toml:3", "learning_rate")),
        ('format = 1\n[cpt]\nrecipe = "infr2"\n', ("infir2.toml:3", "Did you mean 'infir2'?")),
        ("format = 1\n[cpt]\nweight_dekay = 0.1\n", ("infir2.toml:3", "weight_decay")),
        ("format = 1\n[cpt\n", ("infir2.toml", "2")),
    ],
)
def test_mistakes_in_the_project_file(train: Train, tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / "infir2.toml").write_text(text)
    assert_refused(train(), 3, *words)


def test_recipes_that_cannot_run(train: Train) -> None:
    assert_refused(train("--recipe", "nvfp4"), 3, "format e2m1", "transform hadamard", "infir2 recipes list")
    assert_refused(train("--recipe", "infr2"), 3, "Did you mean 'infir2'?")


def test_batches_that_do_not_divide(train: Train) -> None:
    assert_refused(train("--global-batch", 6, "--micro-batch", 2, "--ranks", 2), 3, "6", "2")
    assert_refused(train("--global-batch", 5, "--micro-batch", 2), 3, "global_batch", "5")


def test_random_weights_must_be_asked_for(train: Train) -> None:
    assert_refused(train("--size", "0.5b"), 3, "--from", "--from-scratch")


def test_a_size_that_contradicts_the_weights(train: Train, tmp_path: Path) -> None:
    config = shape_to_hf(load_preset("1.5b").model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(1536)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_refused(train("--size", "0.5b", "--from", tmp_path), 3, "24", "28")


def test_other_settings_under_the_same_name(train: Train, tmp_path: Path) -> None:
    assert train("--steps", 3).returncode == 0
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    refused = train("--steps", 3, "--lr", 5e-4, "--seed", 7)
    assert_refused(refused, 3, "cpt.lr: 0.001 -> 0.0005", "cpt.seed: 1236 -> 7", "--new")
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes() == before


def test_other_data_under_the_same_prefix(train: Train, corpus: Path, tmp_path: Path) -> None:
    prefix = copy_corpus(corpus, tmp_path)
    assert train("--steps", 3, "--data", prefix).returncode == 0
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    again = train("--steps", 3, "--data", copy_corpus(corpus, moved))
    assert again.returncode == 0 and "resuming run at step 3" in again.stdout, "the same corpus in another place"
    sidecar = json.loads(prefix.with_suffix(".json").read_text())
    prefix.with_suffix(".json").write_text(json.dumps(sidecar | {"content": "0" * 64}))
    assert_refused(train("--steps", 3, "--data", prefix), 3, "data.0.content")


def test_a_start_that_was_killed_is_no_obstacle(train: Train, tmp_path: Path) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "recipe.json").write_text("{")
    assert train("--steps", 3).returncode == 0


def test_a_file_where_the_runs_should_be(train: Train, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    assert_refused(train("--steps", 3), 3, "there is a file", "--runs")


@pytest.mark.parametrize("seed", [2**32, -1])
def test_seeds_that_do_not_fit(train: Train, seed: int) -> None:
    assert_refused(train("--seed", seed), 3, "seed")


def test_a_folder_that_is_not_a_run(train: Train, tmp_path: Path) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "letter.txt").write_text("keep me")
    assert_refused(train("--steps", 3), 3, "not a run", "--name")
    assert (tmp_path / "runs" / "run" / "letter.txt").read_text() == "keep me"


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root may write anywhere, no setpriv")
def test_no_permission(corpus: Path, tmp_path: Path) -> None:
    """Root loses its right to override permission bits for this one."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    ordinary = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    root = str(Path(__file__).resolve().parents[2])
    arguments = ["cpt", "--size", "tiny", "--steps", "3", "--data", str(corpus), "--runs", str(locked / "runs")]
    done = subprocess.run(
        [*ordinary, sys.executable, "-m", "infir2_cli", *arguments, "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert_refused(done, 3, "permission", str(locked))


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of `request.param` MB; needs the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("small_disk", [16], indirect=True)
def test_no_room_for_the_checkpoints(train: Train, small_disk: Path) -> None:
    refused = train("--steps", 3, "--runs", small_disk)
    assert_refused(refused, 4, "need", "free", "--runs")
    assert not (small_disk / "run" / "config.toml").exists()


@pytest.mark.parametrize("small_disk", [200], indirect=True)
def test_a_disk_that_fills_up_while_training(corpus: Path, small_disk: Path) -> None:
    """Room for one checkpoint at the start, none for the second: exit 4, and the one that is there stays good."""
    from infir2_core.train.checkpoint import CheckpointStore

    root = str(Path(__file__).resolve().parents[2])
    text = f"""cpt --size tiny --seq-len 64 --global-batch 2 --micro-batch 2 --steps 400 --save-every 10 --eval-every 0
    --warmup-steps 2 --decay-steps 2 --device cpu --data {corpus} --runs {small_disk} --name run"""
    process = subprocess.Popen(
        [sys.executable, "-m", "infir2_cli", *text.split()],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (small_disk / "run" / "checkpoints" / "step-00000010").is_dir():
        assert process.poll() is None
    free = shutil.disk_usage(small_disk).free
    with (small_disk / "ballast").open("wb") as ballast:
        ballast.write(b"\0" * max(0, free - 10_000_000))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 4, errors
    assert "no room for checkpoint" in errors and "Traceback" not in errors
    newest, damaged = CheckpointStore(small_disk / "run" / "checkpoints").newest()
    assert newest is not None and not damaged
