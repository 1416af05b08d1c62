"""One-pass quantisation of a bf16 matrix: read once, both copies written (reference: ops/reference/quantize.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...precision.spec import QuantPlan
from ..reference.quantize import Quantized
from .tiles import (
    STRIP,
    TILE,
    WARPS,
    Copies,
    emit_cols,
    emit_rows,
    encode_scale,
    row_amax,
    supported,
    to_codes,
)


@triton.jit
def _at(x, r, c, width):
    return tl.load(x + r.to(tl.int64)[:, None] * width + c[None, :])


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
    STRIP: tl.constexpr,
    POW2: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_EXP: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
):
    across = width // 128
    r0, c0 = (tl.program_id(0) // across) * 128, (tl.program_id(0) % across) * 128
    whole, strip = tl.arange(0, 128), tl.arange(0, STRIP)
    if ROW:
        for s in range(128 // STRIP):
            r = r0 + s * STRIP + strip
            emit_rows(
                _at(x, r, c0 + whole, width), r, c0, row_codes, row_scale, row_width, row_pitch, nonfinite, True,
                POW2, LIMIT, LIMIT_EXP, LIMIT_BITS,
            )  # fmt: skip
    if COL:
        for s in range(128 // STRIP):
            r, c = r0 + 4 * tl.arange(0, 32), c0 + s * STRIP + strip
            emit_cols(
                _at(x, r, c, width), _at(x, r + 1, c, width), _at(x, r + 2, c, width), _at(x, r + 3, c, width),
                r0, c, col_codes, col_scale, col_width, col_pitch, nonfinite, not ROW,
                POW2, LIMIT, LIMIT_EXP, LIMIT_BITS,
            )  # fmt: skip


@triton.jit
def _quantize_square(
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
    STRIP: tl.constexpr,
    POW2: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_EXP: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
):
    across = width // 128
    r0, c0 = (tl.program_id(0) // across) * 128, (tl.program_id(0) % across) * 128
    c, strip = c0 + tl.arange(0, 128), tl.arange(0, STRIP)
    amax = 0.0
    for s in range(128 // STRIP):
        y = _at(x, r0 + s * STRIP + strip, c, width)
        amax = tl.maximum(amax, tl.max(row_amax(y, nonfinite, True), 0))
    encode, decode = encode_scale(amax, LIMIT, LIMIT_EXP, LIMIT_BITS, POW2)
    dtype: tl.constexpr = row_codes.dtype.element_ty if ROW else col_codes.dtype.element_ty
    for s in range(128 // STRIP):
        r = r0 + s * STRIP + strip
        codes = to_codes(_at(x, r, c, width).to(tl.float32) * encode, dtype)
        if ROW:
            tl.store(row_codes + r.to(tl.int64)[:, None] * row_width + c[None, :], codes)
        if COL:
            tl.store(col_codes + c.to(tl.int64)[:, None] * col_width + r[None, :], tl.trans(codes))
    if ROW:
        tl.store(row_scale + (r0 // 128) * row_pitch + c0 // 128, decode)
    if COL:
        tl.store(col_scale + (c0 // 128) * col_pitch + r0 // 128, decode)


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
    assert copies.spec is not None
    kernel = _quantize_square if copies.spec.block == (TILE, TILE) else _quantize
    kernel[(rows // TILE * (cols // TILE),)](
        x.contiguous(), cols, *copies.arguments(), nonfinite, STRIP=STRIP, **copies.constants(), num_warps=WARPS
    )
    return Quantized(copies.row, copies.col, nonfinite)
