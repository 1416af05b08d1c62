"""One-pass quantisation: a source is read once and both copies of its bf16 values are written.

Sources are a bf16 matrix, a norm of one, and the SwiGLU product of gate and up (reference: ops/reference/quantize.py,
after ops/reference/elementwise.py for the latter two).
"""

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

LOADED, NORMED, SWIGLU = 0, 1, 2


@triton.jit
def _at(x, r, c, width):
    return tl.load(x + r.to(tl.int64)[:, None] * width + c[None, :])


@triton.jit
def _value(x, rstd, weight, r, c, width, SOURCE: tl.constexpr):
    """bfloat16 values at rows r, columns c: x, x * rstd * weight, or silu(gate) * up with x holding gate, then up."""
    if SOURCE == 0:
        y = _at(x, r, c, width)
    elif SOURCE == 1:
        scale = tl.load(weight + c).to(tl.bfloat16).to(tl.float32)
        y = (_at(x, r, c, width).to(tl.float32) * tl.load(rstd + r)[:, None] * scale[None, :]).to(tl.bfloat16)
    else:
        gate = _at(x, r, c, 2 * width).to(tl.float32)
        y = (gate * tl.sigmoid(gate) * _at(x + width, r, c, 2 * width).to(tl.float32)).to(tl.bfloat16)
    return y


@triton.jit
def _quantize(
    x,
    rstd,
    weight,
    plain,
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
    SOURCE: tl.constexpr,
    PLAIN: tl.constexpr,
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
    if ROW or PLAIN:
        for s in range(128 // STRIP):
            r, c = r0 + s * STRIP + strip, c0 + whole
            y = _value(x, rstd, weight, r, c, width, SOURCE)
            if PLAIN:
                tl.store(plain + r.to(tl.int64)[:, None] * width + c[None, :], y)
            if ROW:
                emit_rows(
                    y, r, c0, row_codes, row_scale, row_width, row_pitch, nonfinite, True,
                    POW2, LIMIT, LIMIT_EXP, LIMIT_BITS,
                )  # fmt: skip
    if COL:
        for s in range(128 // STRIP):
            r, c = r0 + 4 * tl.arange(0, 32), c0 + s * STRIP + strip
            emit_cols(
                _value(x, rstd, weight, r, c, width, SOURCE), _value(x, rstd, weight, r + 1, c, width, SOURCE),
                _value(x, rstd, weight, r + 2, c, width, SOURCE), _value(x, rstd, weight, r + 3, c, width, SOURCE),
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
    spec = plan.row or plan.col
    if spec is None or spec.block != (TILE, TILE):
        return quantize_source(LOADED, x.contiguous(), (rows, cols), plan, nonfinite)
    copies = Copies.allocate((rows, cols), plan.row, plan.col, nonfinite)
    _quantize_square[(rows // TILE * (cols // TILE),)](
        x.contiguous(), cols, *copies.arguments(), nonfinite, STRIP=STRIP, **copies.constants(), num_warps=WARPS
    )
    return Quantized(copies.row, copies.col, nonfinite)


def quantize_source(
    source: int,
    x: Tensor,
    shape: tuple[int, ...],
    plan: QuantPlan,
    nonfinite: Tensor,
    rstd: Tensor | None = None,
    weight: Tensor | None = None,
    plain: Tensor | None = None,
) -> Quantized:
    """Copies, in 1x128 blocks, of the [R, C] = `shape` bf16 values that `source` makes of x.

    Args:
        source: LOADED (x itself), NORMED (x * rstd * weight) or SWIGLU (x is gate, then up).
        x: contiguous bfloat16.
        shape: of the values, multiples of 128.
        plan: wanted copies.
        nonfinite: int64 scalar, added to.
        rstd: float32 [R], for NORMED.
        weight: float32 [C], rounded to bf16 before use, for NORMED.
        plain: bfloat16 [R, C] that receives the values.
    """
    rows, cols = shape
    copies = Copies.allocate((rows, cols), plan.row, plan.col, nonfinite)
    spare = (x if tensor is None else tensor for tensor in (rstd, weight, plain))
    _quantize[(rows // TILE * (cols // TILE),)](
        x, *spare, cols, *copies.arguments(), nonfinite, SOURCE=source, PLAIN=plain is not None, STRIP=STRIP,
        **copies.constants(), num_warps=WARPS,
    )  # fmt: skip
    return Quantized(copies.row, copies.col, nonfinite)
