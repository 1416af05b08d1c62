"""Chooses how causal self-attention runs: FlashAttention-4 on Hopper where it is installed, SDPA otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import fast
from .optional import optional
from .reference.attention import attention

FLASH_HEAD_DIMS = (64, 128)  # the widths that tests compare


def self_attention(heads_TNd: Tensor, heads: int, kv_heads: int, lengths: tuple[int, ...]) -> Tensor:
    """softmax(q . k^T / sqrt(head_dim)) . v, causal inside each sequence.

    Args:
        heads_TNd: [T, heads + 2 kv_heads, head_dim], queries, then keys, then values, already rotated.
        heads: query heads, a multiple of kv_heads.
        kv_heads: heads of keys and of values.
        lengths: tokens of each sequence, in order; their sum is T.

    Returns:
        [T, heads, head_dim] in the dtype of the input.
    """
    if implementation(heads_TNd) == "flash-attn-4":
        from .hopper.attention import flash_attention

        return flash_attention(heads_TNd, heads, kv_heads, lengths)
    q, k, v = heads_TNd.split([heads, kv_heads, kv_heads], dim=1)
    return attention(q, k, v, lengths)


def implementation(heads_TNd: Tensor) -> str:
    """`flash-attn-4` or `sdpa`, for a tensor as `self_attention` takes it."""
    fits = fast(heads_TNd) and heads_TNd.dtype == torch.bfloat16 and heads_TNd.shape[2] in FLASH_HEAD_DIMS
    return "flash-attn-4" if fits and _flash_imports() else "sdpa"


def _flash_imports() -> bool:
    return optional("infir2_core.ops.hopper.attention", "attention runs through SDPA") is not None
