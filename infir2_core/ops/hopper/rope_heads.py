"""The end of the fused qkv projection, where its output lies: bias, and rotary embedding of queries and keys.

The bias is added here because the GEMM that is fastest takes none, and its gradient is summed in the pass that turns
the gradients back. Reference: `rope_heads` and `rope_heads_backward` of ops/reference/elementwise.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4  # tokens that a program of the forward takes with one load of the bias
PROGRAMS = 512  # of the backward at most: each leaves one row of sums


@triton.jit
def _rounded(bias, column, inside):
    """The bias in float32 as it is exported: rounded to bfloat16."""
    return tl.load(bias + column, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _rotate(
    qkv,
    bias,
    cos,
    sin,
    tokens,
    heads_in,
    heads_rotated,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    i, j, width = tl.arange(0, HALF)[None, :], tl.arange(0, 2 * HALF)[None, :], heads_in * (2 * HALF)
    head, other = tl.arange(0, ROTATED)[:, None], heads_rotated + tl.arange(0, PLAIN)[:, None]
    column, beyond = head * (2 * HALF) + i, other * (2 * HALF) + j
    low_bias = _rounded(bias, column, head < heads_rotated)
    high_bias = _rounded(bias, column + HALF, head < heads_rotated)
    plain_bias = _rounded(bias, beyond, other < heads_in)
    for row in tl.static_range(ROWS):
        token = first + row
        start, there = qkv + token * width, token < tokens
        c = tl.load(cos + token * HALF + i, mask=there, other=0.0)
        s = tl.load(sin + token * HALF + i, mask=there, other=0.0)
        inside, outside = (head < heads_rotated) & there, (other < heads_in) & there
        low = tl.load(start + column, mask=inside, other=0.0).to(tl.float32) + low_bias
        high = tl.load(start + column + HALF, mask=inside, other=0.0).to(tl.float32) + high_bias
        plain = tl.load(start + beyond, mask=outside, other=0.0).to(tl.float32) + plain_bias
        tl.store(start + column, (low * c - high * s).to(tl.bfloat16), mask=inside)
        tl.store(start + column + HALF, (high * c + low * s).to(tl.bfloat16), mask=inside)
        tl.store(start + beyond, plain.to(tl.bfloat16), mask=outside)


@triton.jit
def _rotate_backward(
    grad,
    sums,
    cos,
    sin,
    tokens,
    heads_in,
    heads_rotated,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Turns ROWS tokens back and leaves their sum over tokens in one row of `sums`."""
    program = tl.program_id(0).to(tl.int64)
    i, j, width = tl.arange(0, HALF)[None, :], tl.arange(0, 2 * HALF)[None, :], heads_in * (2 * HALF)
    head, other = tl.arange(0, ROTATED)[:, None], heads_rotated + tl.arange(0, PLAIN)[:, None]
    column, beyond = head * (2 * HALF) + i, other * (2 * HALF) + j
    low_sum, high_sum = tl.zeros((ROTATED, HALF), tl.float32), tl.zeros((ROTATED, HALF), tl.float32)
    plain_sum = tl.zeros((PLAIN, 2 * HALF), tl.float32)
    for row in range(ROWS):
        token = program * ROWS + row
        start, there = grad + token * width, token < tokens
        c = tl.load(cos + token * HALF + i, mask=there, other=0.0)
        s = tl.load(sin + token * HALF + i, mask=there, other=0.0)
        inside = (head < heads_rotated) & there
        low = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(start + column + HALF, mask=inside, other=0.0).to(tl.float32)
        new_low, new_high = (low * c + high * s).to(tl.bfloat16), (high * c - low * s).to(tl.bfloat16)
        tl.store(start + column, new_low, mask=inside)
        tl.store(start + column + HALF, new_high, mask=inside)
        low_sum += new_low.to(tl.float32)
        high_sum += new_high.to(tl.float32)
        plain_sum += tl.load(start + beyond, mask=(other < heads_in) & there, other=0.0).to(tl.float32)
    tl.store(sums + program * width + column, low_sum, mask=head < heads_rotated)
    tl.store(sums + program * width + column + HALF, high_sum, mask=head < heads_rotated)
    tl.store(sums + program * width + beyond, plain_sum, mask=other < heads_in)


def rotate_(qkv: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, heads_rotated: int) -> Tensor:
    """Adds the bias and rotates the first `heads_rotated` heads of each token, in place.

    Args:
        qkv: bfloat16 [T, heads, head_dim], contiguous; queries, then keys, then values.
        bias: float32 [heads * head_dim].
        cos: float32 [T, head_dim / 2].
        sin: likewise.
        heads_rotated: query and key heads.
    """
    tokens, heads, _ = qkv.shape
    sizes, programs = _sizes(qkv, heads_rotated), triton.cdiv(tokens, ROWS)
    _rotate[(programs,)](qkv, bias, cos, sin, tokens, heads, heads_rotated, ROWS=ROWS, **sizes, num_warps=8)
    return qkv


def rotate_backward_(grad: Tensor, cos: Tensor, sin: Tensor, heads_rotated: int) -> tuple[Tensor, Tensor]:
    """Turns gradients back in place; they, and their sum over tokens, float32 [heads * head_dim]: the bias's gradient.

    Arguments as `rotate_`; the sum is taken in an order that depends on T alone.
    """
    tokens, heads, width = grad.shape
    rows = triton.next_power_of_2(max(1, triton.cdiv(tokens, PROGRAMS)))  # few kernels to compile where T varies
    programs = triton.cdiv(tokens, rows)
    sums = torch.empty(programs, heads * width, dtype=torch.float32, device=grad.device)
    sizes = _sizes(grad, heads_rotated)
    _rotate_backward[(programs,)](grad, sums, cos, sin, tokens, heads, heads_rotated, ROWS=rows, **sizes, num_warps=8)
    return grad, sums.sum(0)


def _sizes(heads_THd: Tensor, rotated: int) -> dict[str, int]:
    _, heads, width = heads_THd.shape
    powers = triton.next_power_of_2(rotated), triton.next_power_of_2(heads - rotated)
    return {"HALF": width // 2, "ROTATED": powers[0], "PLAIN": powers[1]}
