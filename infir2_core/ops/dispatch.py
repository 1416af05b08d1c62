"""Chooses the implementation of each GEMM and remembers which one ran.

Today every GEMM runs in `reference`; where a faster kernel matches (spec, device, shape) it will be chosen here. The
ledger is what the FP8 report after the first microbatch is made of: a run that asked for FP8 and executed none must
not go on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .reference import matmul as reference
from .reference.matmul import Operand
from .reference.quantize import QTensor


@dataclass
class Ledger:
    """Counts GEMMs by (gemm, formats of both operands, implementation) while `recording`."""

    recording: bool = False
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def start(self) -> None:
        """Forgets earlier counts and records from now on."""
        self.recording = True
        self.counts.clear()

    def add(self, gemm: str, a: Operand, b: Operand, implementation: str = "reference") -> None:
        """Counts one GEMM while recording."""
        if self.recording:
            self.counts[gemm, f"{_label(a)} x {_label(b)}", implementation] += 1

    def stop(self) -> Counter[tuple[str, str, str]]:
        """Ends recording; the counts are those of a model step, not of threads or ranks elsewhere."""
        self.recording = False
        return self.counts


ledger = Ledger()


def matmul(gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """A . B^T (+ bias) by the fastest implementation that fits; arguments as `reference.matmul`.

    Args:
        gemm: `fprop`, `dgrad` or `wgrad`, for the ledger.
        a: [M, K].
        b: [N, K].
        out_dtype: bfloat16 or float32.
        bias: [N] or None.
    """
    ledger.add(gemm, a, b)
    return reference.matmul(a, b, out_dtype, bias)


def _label(operand: Operand) -> str:
    if isinstance(operand, QTensor):
        return operand.spec.label()
    return str(operand.dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float32", "fp32")
