"""Residual sum with the norm's row statistic, and the norm's backward (reference: ops/reference/elementwise.py).

A norm needs its whole row before it can scale anything, a column copy needs 128 rows at once, and both together do
not fit into a multiprocessor. So the row statistic comes from the pass that adds the residual, and the tile pass
(quantize.py) reads the sum again: 10 bytes per element for add, norm and both copies, where three separate kernels move
14.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))
