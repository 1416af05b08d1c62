"""Causal attention over packed sequences: no token attends across a border of `cu_seqlens`.

Runs of equally long sequences go through `scaled_dot_product_attention` as one batch, so that CPT (all rows equal) is
one call and a mixed pack is one call per run. On a CPU the arithmetic is float32 and the output is rounded once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """softmax(q . k^T / sqrt(head_dim)) . v, causal inside each sequence.

    Args:
        q_THd: [T, heads, head_dim].
        k_TGd: [T, kv heads, head_dim]; heads is a multiple of kv heads.
        v_TGd: like k.
        lengths: tokens of each sequence, in order; their sum is T.

    Returns:
        [T, heads, head_dim] in the dtype of q.
    """
    outputs, start = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        stop = start + count * length
        q, k, v = (t[start:stop].view(count, length, *t.shape[1:]).transpose(1, 2) for t in (q_THd, k_TGd, v_TGd))
        outputs.append(_batched(q, k, v).transpose(1, 2).reshape(count * length, *q_THd.shape[1:]))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def cached_attention(q_BHd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, seen_BS: Tensor) -> Tensor:
    """softmax(q . k^T / sqrt(head_dim)) . v of one query a sequence, over the keys that it has seen; no gradient.

    The heads that share keys stand where queries of one head would: nothing is repeated for each of them.

    Args:
        q_BHd: [B, heads, head_dim].
        k_BGSd: [B, kv heads, S, head_dim] in the dtype to compute in; finite also where it is not seen.
        v_BGSd: like k.
        seen_BS: bool; at least one in each row.

    Returns:
        [B, heads, head_dim] in the dtype of q.
    """
    q = q_BHd.view(len(q_BHd), k_BGSd.shape[1], -1, q_BHd.shape[2]).to(k_BGSd.dtype)
    # Neither has a plan to make for each new S, as cuDNN has.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(q, k_BGSd, v_BGSd, attn_mask=seen_BS[:, None, None])
    return out.reshape(q_BHd.shape).to(q_BHd.dtype)


def _batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, S, d] against [B, G, S, d]."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and q.is_cuda and _takes_groups(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(q.dtype)
    with _fast_backends(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _takes_groups(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN takes grouped keys and values as they are, without copies for each query head."""
    return torch.backends.cuda.can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, True))


def _fast_backends(q: Tensor) -> AbstractContextManager[None]:
    """cuDNN for half precision: on Hopper it is faster than SDPA's flash backend, in backward most of all."""
    if q.dtype != torch.bfloat16:
        return nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)
