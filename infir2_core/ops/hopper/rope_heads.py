"""Rotary embedding of queries and keys where they lie: in the output of the fused qkv projection.

Reference: `rope` of ops/reference/elementwise.py, which makes new tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(qkv, cos, sin, heads_in, heads_rotated, HALF: tl.constexpr, HEADS: tl.constexpr, SIGN: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, HEADS), tl.arange(0, HALF)
    c, s = tl.load(cos + token * HALF + i)[None, :], SIGN * tl.load(sin + token * HALF + i)[None, :]
    at = qkv + token * heads_in * (2 * HALF) + head[:, None] * (2 * HALF) + i[None, :]
    inside = head[:, None] < heads_rotated
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (low * c - high * s).to(tl.bfloat16), mask=inside)
    tl.store(at + HALF, (high * c + low * s).to(tl.bfloat16), mask=inside)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, heads_rotated: int, backward: bool = False) -> Tensor:
    """Rotates the first `heads_rotated` heads of each token in place; `backward` by the opposite angle.

    Args:
        qkv: bfloat16 [T, heads, head_dim], contiguous; queries, then keys, then values.
        cos: float32 [T, head_dim / 2].
        sin: likewise.
        heads_rotated: query and key heads.
        backward: rotate gradients.
    """
    tokens, heads, width = qkv.shape
    block = triton.next_power_of_2(heads_rotated)
    _rotate[(tokens,)](
        qkv, cos, sin, heads, heads_rotated, HALF=width // 2, HEADS=block, SIGN=-1.0 if backward else 1.0, num_warps=4
    )
    return qkv
