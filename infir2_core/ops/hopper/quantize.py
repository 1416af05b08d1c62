"""One-pass quantisation of a bf16 matrix: read once, both copies written (reference: ops/reference/quantize.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...precision.spec import QuantPlan
from ..reference.quantize import Quantized
from .tiles import TILE, Copies, emit_tile, supported


@triton.jit
def _quantize(
    x,
    width,
    row_codes,
    row_scale,
    row_width,
    row_pitch,
    col_codes,
    col_scale,
    col_width,
    col_pitch,
    nonfinite,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SQUARE: tl.constexpr,
    POW2: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_EXP: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
):
    across = width // 128
    r0, c0 = (tl.program_id(0) // across) * 128, (tl.program_id(0) % across) * 128
    i = tl.arange(0, 128)
    y = tl.load(x + r0.to(tl.int64) * width + c0 + i[:, None] * width + i[None, :]).to(tl.float32)
    emit_tile(
        y, r0, c0, row_codes, row_scale, row_width, row_pitch, col_codes, col_scale, col_width, col_pitch, nonfinite,
        True, ROW, COL, SQUARE, POW2, LIMIT, LIMIT_EXP, LIMIT_BITS,
    )  # fmt: skip


def supports(x: Tensor, plan: QuantPlan) -> bool:
    """Whether `quantize` takes this source and plan."""
    fits = x.dim() == 2 and x.shape[0] % TILE == 0 and x.shape[1] % TILE == 0 and x.numel() > 0
    return fits and x.dtype == torch.bfloat16 and supported(plan.row, plan.col)


def quantize(x: Tensor, plan: QuantPlan, nonfinite: Tensor) -> Quantized:
    """Codes and scales of a [R, C] bf16 tensor, R and C multiples of 128.

    Args:
        x: contiguous bfloat16.
        plan: `supports(x, plan)` holds.
        nonfinite: int64 scalar on the device, to which infinities and NaNs of x are added.

    Returns:
        Copies with the contraction axis contiguous: the col copy is stored as [C, R].
    """
    rows, cols = x.shape
    copies = Copies.allocate((rows, cols), plan.row, plan.col, nonfinite)
    grid = (rows // TILE * (cols // TILE),)
    _quantize[grid](x.contiguous(), cols, *copies.arguments(), **copies.constants(), num_warps=8)
    return Quantized(copies.row, copies.col, nonfinite)
