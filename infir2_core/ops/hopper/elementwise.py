"""Residual sum with the norm's row statistic, and the norm's backward (reference: ops/reference/elementwise.py).

A norm needs its whole row before it can scale anything, a column copy needs 128 rows at once, and both together do
not fit into a multiprocessor. So the row statistic comes from the pass that adds the residual, and the tile pass
(quantize.py) reads the sum again: 10 bytes per element for add, norm and both copies, where three separate kernels move
14. The backward (cuda/norm_backward.cu) reads its inputs once, through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cuda import MULTIPROCESSORS, SHARED_BYTES, launch

LANES = 256  # columns that a warp takes at once, 16 bytes a thread
WIDEST = 28672  # one row of three tensors and the weight still fit


@triton.jit
def _add_rstd(x, delta, total, rstd, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row * width + i, mask=i < width, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * width + i, mask=i < width, other=0.0).to(tl.float32)
        rounded = value.to(tl.bfloat16)
        tl.store(total + row * width + i, rounded, mask=i < width)
        value = rounded.to(tl.float32)
    tl.store(rstd + row, tl.rsqrt(tl.sum(value * value, 0) / width + eps))


def add_rstd(x: Tensor, delta: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta rounded to bf16 (x itself without delta), and 1 / sqrt(mean of squares + eps) of each row.

    Args:
        x: bfloat16 [T, D].
        delta: bfloat16 [T, D] or None.
        eps: of the norm.

    Returns:
        bfloat16 [T, D] and float32 [T].
    """
    rows, width = x.shape
    total = torch.empty_like(x) if delta is not None else x
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    other = delta if delta is not None else x
    _add_rstd[(rows,)](x, other, total, rstd, width, eps, ADD=delta is not None, BLOCK=block, num_warps=_warps(block))
    return total, rstd


def supports_backward(x: Tensor) -> bool:
    """Whether `norm_backward` takes an input like x."""
    return x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and 0 < x.shape[1] <= WIDEST


def norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient of x through RMSNorm, plus the gradient that arrives beside it.

    Args:
        grad: contiguous bfloat16 [T, D], of the normed tensor.
        x: contiguous bfloat16 [T, D], the norm's input; `supports_backward(x)` holds.
        rstd: float32 [T].
        weight: float32 [D], rounded to bf16 before use.
        residual: contiguous bfloat16 [T, D] that is added, or None.

    Returns:
        bfloat16 [T, D], and the weight's gradient float32 [D], summed in an order that depends on T and D alone.
    """
    rows, width = x.shape
    tensors = 2 + (residual is not None)
    by = tuning(width, tensors)
    grid = max(1, min(rows, MULTIPROCESSORS * by.blocks))
    out, total = torch.empty_like(x), torch.empty(width, dtype=torch.float32, device=x.device)
    partial = torch.empty(grid, width, dtype=torch.float32, device=x.device)
    constants = {"WIDTH": width, "ADD": tensors - 2, "WARPS": by.warps, "TEAMS": by.teams, "STAGES": by.stages}
    constants |= {"HOLD": int(by.hold), "BLOCKS": by.blocks, "POW2": 1, "E5M2": 0}
    launch(
        "norm_backward.cu", tuple(sorted(constants.items())), grid, 32 * by.warps * by.teams,
        2 * width * (1 + tensors * by.teams * by.stages),
        (grad, x, rstd, weight, residual, out, partial, rows), x.device,
    )  # fmt: skip
    launch("column_sum.cu", (("E5M2", 0),), -(-width // 32), 512, 0, (partial, total, grid, width), x.device)
    return out, total


@dataclass(frozen=True)
class Tuning:
    """How cuda/norm_backward.cu shares out its work: the defines of these names."""

    warps: int
    teams: int
    stages: int
    hold: bool
    blocks: int = 1


def tuning(width: int, tensors: int) -> Tuning:
    """A thread owns 8 columns where that takes at most 16 warps; rows that wait fill the shared memory.

    Of the forms that were measured on one H200 this was the fastest for rows of 1,536 and of 3,584.

    Args:
        width: of a row, `supports_backward`.
        tensors: bf16 tensors of that width that are read: 2, or 3 with a residual gradient.
    """
    warps = min(16, -(-width // LANES))
    blocks = 2 if warps <= 7 else 1
    slots = (SHARED_BYTES // blocks - 1024 - 2 * width) // (2 * width * tensors)
    teams = max(1, min(28 // (warps * blocks), 12, slots))
    return Tuning(warps, teams, max(1, min(3, slots // teams)), width <= LANES * warps, blocks)


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))
