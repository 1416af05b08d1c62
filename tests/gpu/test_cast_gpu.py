"""The cast on a GPU: the bytes of the cast on a CPU, and at least half the speed of copying the same files to disk."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from hf_models import write_model
from safetensors.torch import load_file, save_file

from infir2_core.config.hf_config import shape_to_hf
from infir2_core.config.presets import load_preset
from infir2_core.convert.cast import cast
from infir2_core.convert.cast_plan import plan_cast
from infir2_core.convert.folder import open_folder, tensor_shapes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pow2", [True, False])
def test_a_gpu_writes_the_bytes_of_a_cpu(tmp_path: Path, pow2: bool) -> None:
    write_model(tmp_path / "hf", layers=3, shard="400KB")
    plan = plan_cast(open_folder(tmp_path / "hf"), pow2)
    for device in ("cpu", "cuda"):
        cast(plan, tmp_path / device, device)
    for file in sorted((tmp_path / "cpu").glob("*.safetensors")):
        ours, theirs = load_file(file), load_file(tmp_path / "cuda" / file.name)
        for name, tensor in ours.items():
            if pow2 or tensor.dtype not in (torch.float32, torch.float8_e4m3fn):
                assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name
            elif tensor.dtype == torch.float32:  # a GPU may divide with another last bit
                assert torch.allclose(tensor, theirs[name], rtol=3e-7), name


def test_speed_against_a_plain_copy(tmp_path: Path) -> None:
    shape = load_preset("1.5b").model
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(shape_to_hf(shape)))
    made = {
        name: (torch.randn(size, device="cuda") * 0.02).bfloat16().cpu() for name, size in tensor_shapes(shape).items()
    }
    save_file(made, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    plan = plan_cast(open_folder(tmp_path / "hf"), True)
    cast(plan, tmp_path / "warm", "cuda")
    best_copy = best_cast = float("inf")
    for attempt in range(3):
        start = time.perf_counter()
        shutil.copytree(tmp_path / "hf", tmp_path / f"copy{attempt}")
        for file in (tmp_path / f"copy{attempt}").iterdir():  # the cast does not end before its files are on the disk
            with file.open("rb") as written:
                os.fsync(written.fileno())
        best_copy = min(best_copy, time.perf_counter() - start)
        start = time.perf_counter()
        cast(plan, tmp_path / f"fp8-{attempt}", "cuda")
        best_cast = min(best_cast, time.perf_counter() - start)
    print(f"cast {plan.input_bytes / 1e6 / best_cast:.0f} MB/s, copy {plan.input_bytes / 1e6 / best_copy:.0f} MB/s")
    assert best_cast <= 2 * best_copy
