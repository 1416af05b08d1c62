"""Conversions where memory and disk are short: growth of at most two shards, and nothing half-made on a full disk."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import write_model
from safetensors.torch import save_file

from infir2_core.config.hf_config import shape_to_hf
from infir2_core.config.presets import load_preset
from infir2_core.convert.folder import tensor_shapes

Cli = Callable[..., Any]
ROOT = Path(__file__).parents[2]

# Every command on the small model, then on the large one in the same process: how far memory rises above what it was.
GROWTH = """
import json, os, re, sys
from pathlib import Path
cores = int(sys.argv[1])
os.cpu_count = lambda: cores
from infir2_cli.main import main

def memory(key): return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

grown = {}
for size in ("small", "large"):
    commands = [
        ["cast-fp8", size, size + "-fp8", "--device", "cpu"], ["convert", "verify", size + "-fp8"],
        ["convert", "from-hf", size, size + "-n"], ["convert", "to-hf", size + "-n", size + "-n-hf"],
        ["convert", "from-hf", size, size + "-m", "--layout", "megatron"],
        ["convert", "to-hf", size + "-m", size + "-m-hf"], ["convert", "check", size, size + "-m-hf"],
    ]
    for words in commands:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before, sys.argv = memory("VmRSS"), ["infir2", *words]
        try: main()
        except SystemExit as done:
            if done.code: raise
        grown[" ".join(words)] = memory("VmHWM") - before
print("GROWN", json.dumps(grown))
"""


def write_sharded(folder: Path, layers: int) -> int:
    """A random model with a file for each block; the size of the largest file."""
    shape = load_preset("1.5b").model.model_copy(update={"layers": layers, "vocab": 2048, "ffn": 8192, "hidden": 1024})
    shape = shape.model_copy(update={"heads": 8})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape_to_hf(shape)))
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, size in tensor_shapes(shape).items():
        home = f"{name.split('.')[2]}.safetensors" if ".layers." in name else "rest.safetensors"
        files.setdefault(home, {})[name] = torch.randn(size).mul_(0.02).bfloat16()
    for home, held in files.items():
        save_file(held, folder / home, metadata={"format": "pt"})
    index = {"weight_map": {name: home for home, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return max((folder / home).stat().st_size for home in files)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_grows_by_at_most_two_shards(tmp_path: Path) -> None:
    write_sharded(tmp_path / "small", 1)
    shard = write_sharded(tmp_path / "large", 5)
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, "64"],  # cores: more of them must not hold more
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    grown = {words: n / shard for words, n in json.loads(done.stdout.split("GROWN")[1]).items() if " large" in words}
    assert len(grown) == 7 and max(grown.values()) < 2, grown


def limited(tmp_path: Path, words: tuple[str, ...], nbytes: int) -> subprocess.CompletedProcess[str]:
    """The command where no file may become larger than `nbytes`, which fails like a disk that fills up on the way."""
    return subprocess.run(
        [sys.executable, "-m", "infir2_cli", *words],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes)),
    )


def test_a_disk_that_fills_up_on_the_way_costs_nothing(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=2, shard="400KB", vocab=900)
    assert run_cli("convert", "from-hf", "hf", "native", cwd=tmp_path).returncode == 0
    commands = (
        ("cast-fp8", "hf", "fp8", "--device", "cpu"),
        ("convert", "to-hf", "native", "again"),
        ("convert", "from-hf", "hf", "other"),
        ("convert", "from-hf", "hf", "megatron", "--layout", "megatron"),
    )
    for words in commands:
        out = tmp_path / next(word for word in words[2:] if not (tmp_path / word).exists())
        before = {path.name for path in tmp_path.iterdir()}
        done = limited(tmp_path, words, 300_000)
        assert done.returncode == 3 and "no room for the output" in done.stderr, done.stderr
        assert "type the same command again" in done.stderr and "Traceback" not in done.stderr
        assert {path.name for path in tmp_path.iterdir()} - before == {f"{out.name}.partial"}
        done = run_cli(*words, cwd=tmp_path)
        assert done.returncode == 0 and out.is_dir(), done.stderr
        assert {path.name for path in tmp_path.iterdir()} - before == {out.name}
    for left, right in (("hf", "again"), ("native", "other"), ("hf", "megatron")):
        assert run_cli("convert", "check", left, right, cwd=tmp_path).returncode == 0, right
    assert run_cli("convert", "verify", "fp8", cwd=tmp_path).returncode == 0


def test_a_disk_without_room_for_one_small_file(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    script = tmp_path / "run.sh"
    flags = "--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --num-query-groups 4"
    script.write_text(f"python pretrain_gpt.py {flags}\n")
    before = sorted(tmp_path.rglob("*"))
    card = (tmp_path / "hf/README.md").read_text()
    for words, where in (
        (("init", "deep/project", "--from-script", "run.sh"), "deep/project/infir2.toml"),
        (("init", "deep/project"), "deep/project/infir2.toml"),
        (("hub", "card", "hf", "--write"), "hf/README.md"),
    ):
        done = limited(tmp_path, words, 10)
        assert done.returncode == 3 and "no room" in done.stderr and f"where: {where}" in done.stderr, done.stderr
        assert "type the same command again" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "hf/README.md").read_text() == card
