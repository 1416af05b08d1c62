"""Where tests of the kernels run: on a Hopper GPU where there is one, else on the CPU.

There the CUDA sources are compiled by g++ (cuda_on_cpu.py), and those in Triton run in its interpreter (conftest.py
switches it on), whose conversion to bf16 rounds halves up and is replaced by torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cuda_on_cpu
import fresh
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="some kernels are written in Triton")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if HOPPER else "cpu"

from infir2_core.ops.hopper import elementwise, loss, quantize, shift, weights  # noqa: E402

KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Round-to-nearest-even conversion of raw bits, in place of the interpreter's."""
    signed, unsigned = {2: (np.int16, np.uint16), 4: (np.int32, np.uint32)}, {2: torch.int16, 4: torch.int32}
    bits = np.ascontiguousarray(data).view(signed[data.dtype.itemsize][0]).copy()
    out = torch.from_numpy(bits).view(KINDS[source.name]).to(KINDS[target.name])
    size = out.element_size()
    return out.view(unsigned[size]).numpy().view(signed[size][1]).reshape(data.shape)


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not HOPPER:
        from triton.runtime import interpreter

        if cuda_on_cpu.COMPILER is None:
            pytest.skip("no g++ to compile the CUDA kernels for the CPU")
        monkeypatch.setattr(interpreter, "_convert_float", convert)
        for module in (elementwise, loss, quantize, shift, weights):
            monkeypatch.setattr(module, "launch", cuda_on_cpu.launch)
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def poisoned_buffers() -> Iterator[None]:
    """Every uninitialised buffer holds NaN or the largest integer, so that an element nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


def normal(rows: int, cols: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = fresh.generator(seed)
    return (scale * torch.randn(rows, cols, generator=generator)).bfloat16().to(DEVICE)
