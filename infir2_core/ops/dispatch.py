"""Chooses the implementation of each op and remembers which GEMM ran where.

`hopper` kernels run on CUDA devices of compute capability 9 wherever they support the spec and the shape; everything
else runs in `reference`. The environment variable INFIR2_OPS=reference switches the kernels off, which is how one tells
whether a difference comes from them. The ledger is what the FP8 report after the first microbatch is made of: a run
that asked for FP8 and executed none must not go on.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..precision.spec import QSpec, QuantPlan
from .reference import matmul as reference
from .reference import quantize as reference_quantize
from .reference.matmul import Operand
from .reference.quantize import QTensor, Quantized, State


@dataclass
class Ledger:
    """Counts GEMMs by (gemm, formats of both operands, implementation) while `recording`."""

    recording: bool = False
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def start(self) -> None:
        """Forgets earlier counts and records from now on."""
        self.recording = True
        self.counts.clear()

    def add(self, gemm: str, a: Operand, b: Operand, implementation: str) -> None:
        """Counts one GEMM while recording."""
        if self.recording:
            self.counts[gemm, f"{_label(a)} x {_label(b)}", implementation] += 1

    def stop(self) -> Counter[tuple[str, str, str]]:
        """Ends recording; the counts are those of a model step, not of threads or ranks elsewhere."""
        self.recording = False
        return self.counts


ledger = Ledger()


def fast(x: Tensor) -> bool:
    """Whether the Hopper kernels may be used for tensors that live where x does."""
    return x.is_cuda and _hopper(x.device.index) and os.environ.get("INFIR2_OPS") != "reference"


@cache
def _hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9 and find_spec("triton") is not None


def quantize(x: Tensor, plan: QuantPlan, state: State | None = None, nonfinite: Tensor | None = None) -> Quantized:
    """Quantises a [R, C] tensor by the fastest implementation that fits; arguments as `reference.quantize`.

    Args:
        x: bfloat16 or float32.
        plan: the wanted copies.
        state: for delayed scaling.
        nonfinite: int64 scalar on the device of x, to which infinities and NaNs are added.
    """
    if nonfinite is None:
        nonfinite = torch.zeros((), dtype=torch.int64, device=x.device)
    if fast(x):
        from .hopper import quantize as hopper

        if hopper.supports(x, plan):
            return hopper.quantize(x, plan, nonfinite)
    made = reference_quantize.quantize(x, plan, state)
    nonfinite += made.nonfinite
    return Quantized(made.row, made.col, nonfinite)


def transposed(q: QTensor) -> QTensor:
    """The column copy of a matrix in square blocks from its row copy: the same codes, and scales of the same blocks."""
    if fast(q.data):
        from .hopper import gemm, weights

        if gemm.laid_out(q) and weights.supports(q.data):
            return weights.transposed(q)
    return q.transpose()


def shifted(q: QTensor, spec: QSpec) -> QTensor:
    """The column copy by `spec` of a matrix from its row copy's codes: `reference.quantize.shifted`."""
    if fast(q.data):
        from .hopper import shift as hopper

        if hopper.supports(q, spec):
            return hopper.shifted(q, spec)
    return reference_quantize.shifted(q, spec)


def matmul(
    gemm: str,
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    total: Tensor | None = None,
) -> Tensor:
    """A . B^T by the fastest implementation that fits; arguments as `reference.matmul`.

    Args:
        gemm: `fprop`, `dgrad` or `wgrad`, for the ledger.
        a: [M, K].
        b: [N, K].
        out_dtype: bfloat16 or float32.
        total: [M, N] in `out_dtype`, to which the product is added in place, and which is returned then.
    """
    if isinstance(a, QTensor) and isinstance(b, QTensor) and fast(a.data):
        from .hopper import gemm as hopper

        if hopper.supports(a, b):
            by = hopper.choose(a, b, out_dtype)
            ledger.add(gemm, a, b, by)
            return hopper.scaled_matmul(a, b, out_dtype, by, total)
    quantised = isinstance(a, QTensor) or isinstance(b, QTensor)
    ledger.add(gemm, a, b, "reference" if quantised else "torch")
    made = reference.matmul(a, b, out_dtype)
    return made if total is None else total.add_(made)


def _label(operand: Operand) -> str:
    if isinstance(operand, QTensor):
        return operand.spec.label()
    return str(operand.dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float32", "fp32")
