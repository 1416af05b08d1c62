"""Residual, RMSNorm and SwiGLU, forward and backward, each with the quantisation of what it makes.

The reference is ops/reference/elementwise.py followed by ops/reference/quantize.py: each kernel rounds to bf16 where
the unfused op would store, and quantises that. `plain` receives that bf16 tensor: it is all that a
bf16 recipe wants, and what the tests compare.

A norm needs its whole row before it can scale anything, a column copy needs 128 rows at once, and both together do
not fit into a multiprocessor. So the row statistic comes from the pass that adds the residual, and the tile pass reads
the sum again: 10 bytes per element for add, norm and both copies, where three separate kernels move 14.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...precision.spec import QSpec, QuantPlan
from ..reference.quantize import QTensor, Quantized
from .quantize import NORMED, SWIGLU, quantize_source
from .tiles import STRIP, TILE, WARPS, Copies, emit_cols, emit_rows

ROWS_EACH = 32  # rows whose weight gradients one program of the norm's backward adds up


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


def norm_quantize(
    x: Tensor, rstd: Tensor, weight: Tensor, plan: QuantPlan, nonfinite: Tensor, plain: Tensor | None = None
) -> Quantized:
    """Copies of x * rstd * weight.

    Args:
        x: bfloat16 [T, D].
        rstd: float32 [T], from `add_rstd`.
        weight: float32 [D], rounded to bf16 before use.
        plan: wanted copies.
        nonfinite: int64 scalar, added to.
        plain: bfloat16 [T, D] that receives the normed tensor.
    """
    return quantize_source(NORMED, x, tuple(x.shape), plan, nonfinite, rstd, weight, plain)


@triton.jit
def _norm_backward(
    grad,
    x,
    rstd,
    weight,
    residual,
    out,
    partial,
    rows,
    width,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    scale = tl.load(weight + i, mask=i < width, other=0.0).to(tl.bfloat16).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * EACH
    for step in range(EACH):
        row = tl.minimum(first + step, rows)
        inside = (i < width) & (row < rows)
        at = row.to(tl.int64) * width + i
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * inverse
        total += g * normed
        g *= scale
        projection = tl.sum(g * normed, 0) / width
        dx = ((g - normed * projection) * inverse).to(tl.bfloat16)
        if ADD:
            dx = (dx.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(tl.bfloat16)
        tl.store(out + at, dx, mask=inside)
    tl.store(partial + tl.program_id(0).to(tl.int64) * width + i, total, mask=i < width)


def norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient of x through RMSNorm, plus the gradient that arrives beside it.

    Args:
        grad: bfloat16 [T, D], of the normed tensor.
        x: bfloat16 [T, D], the norm's input.
        rstd: float32 [T].
        weight: float32 [D].
        residual: bfloat16 [T, D] that is added, or None.

    Returns:
        bfloat16 [T, D], and the weight's gradient float32 [D].
    """
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    programs = triton.cdiv(rows, ROWS_EACH)
    out = torch.empty_like(x)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        grad, x, rstd, weight, grad if residual is None else residual, out, partial, rows, width,
        ADD=residual is not None, BLOCK=block, EACH=ROWS_EACH, num_warps=_warps(block),
    )  # fmt: skip
    return out, partial.sum(0)


def swiglu_quantize(gate_up: Tensor, plan: QuantPlan, nonfinite: Tensor, plain: Tensor | None = None) -> Quantized:
    """Copies of silu(gate) * up.

    Args:
        gate_up: bfloat16 [T, 2F], gate first.
        plan: wanted copies.
        nonfinite: int64 scalar, added to.
        plain: bfloat16 [T, F] that receives the product.
    """
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    return quantize_source(SWIGLU, gate_up, shape, plan, nonfinite, plain=plain)


@triton.jit
def _gradients(grad, gate_up, r, c, width):
    """bfloat16 gradients of gate and of up, and the product, at rows r and columns c of the product."""
    at = gate_up + r.to(tl.int64)[:, None] * (2 * width) + c[None, :]
    g = tl.load(grad + r.to(tl.int64)[:, None] * width + c[None, :]).to(tl.float32)
    gate, up = tl.load(at).to(tl.float32), tl.load(at + width).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    for_gate = (g * up * (sigmoid + silu * (1 - sigmoid))).to(tl.bfloat16)
    return for_gate, (g * silu).to(tl.bfloat16), (silu * up).to(tl.bfloat16)


@triton.jit
def _swiglu_backward_quantize(
    grad,
    gate_up,
    plain,
    plain_product,
    width,
    a_codes,
    a_scale,
    a_width,
    a_pitch,
    row_codes,
    row_scale,
    row_width,
    row_pitch,
    col_codes,
    col_scale,
    col_width,
    col_pitch,
    nonfinite,
    PLAIN: tl.constexpr,
    PLAIN_PRODUCT: tl.constexpr,
    PRODUCT: tl.constexpr,
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
    if ROW or PLAIN or PLAIN_PRODUCT:
        for s in range(128 // STRIP):
            r, c = r0 + s * STRIP + strip, c0 + whole
            for_gate, for_up, product = _gradients(grad, gate_up, r, c, width)
            if PLAIN_PRODUCT:
                tl.store(plain_product + r.to(tl.int64)[:, None] * width + c[None, :], product)
            if PLAIN:
                at = plain + r.to(tl.int64)[:, None] * (2 * width) + c[None, :]
                tl.store(at, for_gate)
                tl.store(at + width, for_up)
            if ROW:
                emit_rows(
                    for_gate, r, c0, row_codes, row_scale, row_width, row_pitch, nonfinite, True,
                    POW2, LIMIT, LIMIT_EXP, LIMIT_BITS,
                )  # fmt: skip
                emit_rows(
                    for_up, r, width + c0, row_codes, row_scale, row_width, row_pitch, nonfinite, True,
                    POW2, LIMIT, LIMIT_EXP, LIMIT_BITS,
                )  # fmt: skip
    if COL or PRODUCT:
        for s in range(128 // STRIP):
            r, c = r0 + 4 * tl.arange(0, 32), c0 + s * STRIP + strip
            gate0, up0, product0 = _gradients(grad, gate_up, r, c, width)
            gate1, up1, product1 = _gradients(grad, gate_up, r + 1, c, width)
            gate2, up2, product2 = _gradients(grad, gate_up, r + 2, c, width)
            gate3, up3, product3 = _gradients(grad, gate_up, r + 3, c, width)
            if PRODUCT:
                emit_cols(
                    product0, product1, product2, product3, r0, c, a_codes, a_scale, a_width, a_pitch, nonfinite, False,
                    POW2, LIMIT, LIMIT_EXP, LIMIT_BITS,
                )  # fmt: skip
            if COL:
                emit_cols(
                    gate0, gate1, gate2, gate3, r0, c, col_codes, col_scale, col_width, col_pitch, nonfinite, not ROW,
                    POW2, LIMIT, LIMIT_EXP, LIMIT_BITS,
                )  # fmt: skip
                emit_cols(
                    up0, up1, up2, up3, r0, width + c, col_codes, col_scale, col_width, col_pitch, nonfinite, not ROW,
                    POW2, LIMIT, LIMIT_EXP, LIMIT_BITS,
                )  # fmt: skip


def swiglu_backward_quantize(
    grad: Tensor,
    gate_up: Tensor,
    plan: QuantPlan,
    product: QSpec | None,
    nonfinite: Tensor,
    plain: Tensor | None = None,
    plain_product: Tensor | None = None,
) -> tuple[Quantized, QTensor | None]:
    """Copies of the gradient of gate_up and, rebuilt on the way, the product's column copy.

    Args:
        grad: bfloat16 [T, F], of silu(gate) * up.
        gate_up: bfloat16 [T, 2F].
        plan: copies wanted of the gradient.
        product: the spec of the product's column copy, that of `plan`; None: not wanted.
        nonfinite: int64 scalar, added to (by the gradient; the product was counted in the forward).
        plain: bfloat16 [T, 2F] that receives the gradient.
        plain_product: bfloat16 [T, F] that receives the product.
    """
    rows, width = grad.shape
    copies = Copies.allocate((rows, 2 * width), plan.row, plan.col, nonfinite)
    rebuilt = Copies.allocate((rows, width), None, product, nonfinite)
    constants = (copies if copies.spec else rebuilt).constants()
    constants |= {"ROW": plan.row is not None, "COL": plan.col is not None}
    _swiglu_backward_quantize[(rows // TILE * (width // TILE),)](
        grad, gate_up, gate_up if plain is None else plain, gate_up if plain_product is None else plain_product, width,
        *rebuilt.arguments()[4:8], *copies.arguments(), nonfinite, PLAIN=plain is not None,
        PLAIN_PRODUCT=plain_product is not None, PRODUCT=product is not None,
        STRIP=STRIP // 2, **constants, num_warps=WARPS // 2,  # five copies need twice the registers
    )  # fmt: skip
    return Quantized(copies.row, copies.col, nonfinite), rebuilt.col


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))
