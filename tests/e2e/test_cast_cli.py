"""`infir2 cast-fp8` and `infir2 convert verify` as a user types them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import write_model
from safetensors.torch import load_file, save_file

from infir2_core.config.hf_config import shape_to_hf
from infir2_core.config.presets import load_preset
from infir2_core.convert.folder import tensor_shapes

Cli = Callable[..., Any]


def test_dry_run_cast_verify(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", shard="400KB")
    done = run_cli("cast-fp8", "hf", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and "nothing was written" in done.stdout and not (tmp_path / "hf-fp8").exists()
    assert "scales: float32 (the source has no recipe.json)" in done.stdout
    done = run_cli("cast-fp8", "hf", "--pow2-scale", "--json", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["out"] == "hf-fp8" and report["scale"] == "pow2"
    assert 0.02 < report["total"]["relative_error"] < 0.04
    for folder, kind in (("hf", "bfloat16"), ("hf-fp8", "fp8")):
        done = run_cli("convert", "verify", folder, "--json", cwd=tmp_path)
        assert done.returncode == 0 and json.loads(done.stdout)["kind"] == kind
    done = run_cli("cast-fp8", "hf", cwd=tmp_path)
    assert done.returncode == 3 and "exists already" in done.stderr and "rm -r hf-fp8" in done.stderr


def test_verify_exits_3_and_names_everything(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    held = load_file(tmp_path / "hf/model.safetensors")
    held["model.norm.weight"][0], held["lm_head.weight"][4, 4] = float("nan"), float("inf")
    save_file(held, tmp_path / "hf/model.safetensors")
    done = run_cli("convert", "verify", "hf", cwd=tmp_path)
    assert done.returncode == 3
    assert "'model.norm.weight' has NaN" in done.stdout and "'lm_head.weight' has infinite values" in done.stdout
    done = run_cli("cast-fp8", "hf", cwd=tmp_path)
    assert done.returncode == 3 and "has " in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_killed_cast_is_finished_by_the_same_command(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=6, shard="400KB", vocab=40_000)
    assert run_cli("cast-fp8", "hf", "whole", "--device", "cpu", cwd=tmp_path).returncode == 0
    command = [sys.executable, "-m", "infir2_cli", "cast-fp8", "hf", "fp8", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for number in (1, 3, 5):
        child = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        while len(list((tmp_path / "fp8.partial").glob("*.safetensors"))) < number and child.poll() is None:
            time.sleep(0.001)
        child.kill()
        child.wait()
    done = run_cli("cast-fp8", "hf", "fp8", "--device", "cpu", cwd=tmp_path)
    if done.returncode:  # the last kill came too late
        assert "exists already" in done.stderr
    names = sorted(p.name for p in (tmp_path / "whole").iterdir() if p.is_file())
    assert names == sorted(p.name for p in (tmp_path / "fp8").iterdir() if p.is_file())
    assert all((tmp_path / "fp8" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--force-pow-2-scale", "False"], 2, "no such option: --force-pow-2-scale"),
        (["--block", "128"], 2, "'128' is no block size"),
        (["--block", "1e9"], 2, "'1e9' is no block size"),
        (["--block", f"{10**30},128"], 2, "is no block size"),
        (["--block", "\u0661\u00b2,128"], 2, "is no block size"),
        (["--block", "1000000000,128"], 2, "1 to 1024 rows and columns, not 1000000000x128"),
        (["--block", "128,1025"], 2, "1 to 1024 rows and columns, not 128x1025"),
        (["--block", "0,128"], 2, "1 to 1024 rows and columns, not 0x128"),
        (["--keep", "lm_haed"], 2, "matches no linear layer"),
    ],
)
def test_wrong_options(run_cli: Cli, tmp_path: Path, words: list[str], code: int, expected: str) -> None:
    write_model(tmp_path / "hf", layers=1)
    done = run_cli("cast-fp8", "hf", *words, cwd=tmp_path)
    assert done.returncode == code and expected in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_folder_that_is_none_and_an_unknown_class(run_cli: Cli, tmp_path: Path) -> None:
    done = run_cli("cast-fp8", "nothing", cwd=tmp_path)
    assert done.returncode == 3 and "neither a folder, nor a hub id, nor a run" in done.stderr
    done = run_cli("cast-fp8", "nobody/nothing", cwd=tmp_path)
    assert done.returncode == 3 and "the hub cannot be reached" in done.stderr and "HF_HUB_OFFLINE" in done.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "llama"}')
    done = run_cli("cast-fp8", "other", cwd=tmp_path)
    assert done.returncode == 3 and "qwen2" in done.stderr


def test_an_export_is_used_again_only_if_it_is_what_would_be_made(
    run_cli: Cli, train: Callable[..., Any], tmp_path: Path
) -> None:
    assert train("--steps", 1, name="mine").returncode == 0
    export = tmp_path / "runs/mine/hf/step-00000001"
    cast = ["cast-fp8", "mine", "fp8", "--device", "cpu"]
    assert run_cli("convert", "to-hf", "mine", "--dtype", "float32", cwd=tmp_path).returncode == 0
    done = run_cli(*cast, cwd=tmp_path)
    assert done.returncode == 3 and "weights are float32, not bfloat16" in done.stderr, done.stderr
    assert f"rm -r {export}" in done.stderr.replace("\n", " ") and not (tmp_path / "fp8").exists()
    shutil.rmtree(export)
    assert run_cli("convert", "to-hf", "mine", cwd=tmp_path).returncode == 0
    made = (export / "model.safetensors").stat().st_mtime_ns
    done = run_cli(*cast, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (export / "model.safetensors").stat().st_mtime_ns == made
    assert not [path for path in (tmp_path / "fp8").iterdir() if path.name.startswith(".")]
    shutil.rmtree(tmp_path / "fp8")
    (tmp_path / "runs/mine/hf").rename(tmp_path / "kept")
    shutil.rmtree(tmp_path / "runs/mine")  # the run is trained again under the same name
    assert train("--steps", 1, "--seed", 5, name="mine").returncode == 0
    (tmp_path / "kept").rename(tmp_path / "runs/mine/hf")
    for _ in range(2):
        done = run_cli(*cast, cwd=tmp_path)
        assert done.returncode == 3 and "not made of this checkpoint" in done.stderr, done.stderr
        (export / ".infir2-export.json").unlink(missing_ok=True)  # and one that does not say
    assert run_cli("cast-fp8", export, "fp8", "--device", "cpu", cwd=tmp_path).returncode == 0


def test_a_checkpoint_is_only_read(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    assert run_cli("convert", "from-hf", "hf", "run/ckpt", cwd=tmp_path).returncode == 0
    before = sorted(tmp_path.rglob("*"))
    run_cli("cast-fp8", "run/ckpt", "made", "--keep", "nothing", "--device", "cpu", cwd=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before  # a refusal leaves nothing either
    done = run_cli("cast-fp8", "run/ckpt", "made", "--device", "cpu", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["source"] == "run/ckpt", done.stderr
    assert {path.relative_to(tmp_path).parts[0] for path in set(tmp_path.rglob("*")) - set(before)} == {"made"}
    assert (
        run_cli("cast-fp8", "hf", "~/x", "--device", "cpu", cwd=tmp_path, env={"HOME": str(tmp_path)}).returncode == 0
    )
    assert (tmp_path / "x/config.json").is_file() and not (tmp_path / "~").exists()


def test_what_is_not_copied_is_said(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    (tmp_path / "hf/.hidden").mkdir()
    (tmp_path / "hf/.hidden/file").write_text("")
    for words in (("--dry-run",), ()):
        done = run_cli("cast-fp8", "hf", "fp8", "--device", "cpu", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "not copied: .hidden/, pytorch_model.bin" in " ".join(done.stdout.split())
    assert not (tmp_path / "fp8/pytorch_model.bin").exists() and not (tmp_path / "fp8/.hidden").exists()


PEAK = """
import re, sys
from infir2_cli.main import main
try: main()
finally: print("PEAK", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""


@pytest.mark.slow
def test_speed_and_memory_of_a_cast(tmp_path: Path) -> None:
    """At least 150 MB/s of bf16 on two cores, and memory that does not grow with the model."""
    shape = load_preset("1.5b").model.model_copy(update={"layers": 12, "vocab": 4096})
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(shape_to_hf(shape)))
    made = {name: (torch.randn(size) * 0.02).bfloat16() for name, size in tensor_shapes(shape).items()}
    save_file(made, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    nbytes = sum(tensor.nbytes for tensor in made.values())
    del made
    command = [sys.executable, "-c", PEAK, "cast-fp8", "hf", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    assert nbytes / 1e6 / seconds > 150, f"{nbytes / 1e6 / seconds:.0f} MB/s"
    peak = int(done.stderr.split("PEAK")[1]) * 1024
    assert peak < 0.5 * nbytes, f"{peak / 1e6:.0f} MB for a model of {nbytes / 1e6:.0f} MB"


def test_file_names_that_are_no_text(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    odd = os.fsencode(tmp_path / "hf") + b"/\xff.txt"
    Path(os.fsdecode(odd)).write_text("kept")
    done = run_cli("cast-fp8", "hf", "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0 and "\udcff.txt" in json.loads(done.stdout)["side_files"], done.stderr
    assert run_cli("cast-fp8", "hf", "--device", "cpu", cwd=tmp_path).returncode == 0
    assert Path(os.fsdecode(odd.replace(b"/hf/", b"/hf-fp8/"))).read_text() == "kept"
    done = run_cli("cast-fp8", "hf", "x" * 300, cwd=tmp_path)
    assert done.returncode == 3 and "file name too long" in done.stderr


def test_the_folder_one_stands_in(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "model", layers=1)
    done = run_cli("cast-fp8", ".", cwd=tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model-fp8/config.json").is_file()
