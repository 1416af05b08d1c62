"""The probes that need a GPU, against what torch and the driver say."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from infir2_core.machine import probe


@pytest.mark.gpu
def test_gpu_facts_agree_with_torch_and_the_driver() -> None:
    import torch

    found = probe(Path.cwd())
    assert [gpu.capability for gpu in found.gpus] == [
        torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
    ]
    assert found.cublas is not None and found.cuda is not None
    # cuBLAS has the major version of the CUDA release it ships with
    assert re.fullmatch(r"\d+\.\d+\.\d+", found.cublas) and found.cublas.split(".")[0] == found.cuda.split(".")[0]
    assert found.nccl == ".".join(map(str, torch.cuda.nccl.version()))
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0]
        assert found.driver == told.strip()
