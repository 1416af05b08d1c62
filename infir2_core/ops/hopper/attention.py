"""FlashAttention-4 on the projection's own buffer: gradients of q, k and v are written side by side.

Its public function returns three gradients that autograd would then have to copy together; the functions beneath it
take the places to write to. They are not a public interface, which is why the version is pinned (pyproject.toml).
Sequences of one length run as a batch, which is faster than the form for packed rows; both give the same numbers.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kept import forgive, keep_flash_attention

keep_flash_attention()
from flash_attn.cute.cache_utils import JITPersistentCache  # type: ignore[import-not-found]  # noqa: E402
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # type: ignore[import-not-found]  # noqa: E402

forgive(JITPersistentCache)
# Said while each kernel compiles; it concerns an argument that is not used here.
warnings.filterwarnings("ignore", message="Argument aux_data")


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_TNd: Tensor, sizes: tuple[int, int, int], lengths: tuple[int, ...]) -> Tensor:
        q, k, v = _parts(heads_TNd, sizes, lengths)
        packed = _packed(lengths, heads_TNd.device.index)
        out, lse = _flash_attn_fwd(q, k, v, causal=True, return_lse=True, **packed)[:2]
        ctx.sizes, ctx.lengths = sizes, lengths
        ctx.save_for_backward(heads_TNd, out, lse)
        return out.reshape(len(heads_TNd), sizes[0], -1)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        heads_TNd, out, lse = ctx.saved_tensors
        made = torch.empty_like(heads_TNd)
        dq, dk, dv = _parts(made, ctx.sizes, ctx.lengths)
        _flash_attn_bwd(
            *_parts(heads_TNd, ctx.sizes, ctx.lengths), out, grads[0].contiguous().view_as(out), lse, causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(), dq=dq, dk=dk, dv=dv,
            **_packed(ctx.lengths, heads_TNd.device.index),
        )  # fmt: skip
        return made, None, None


def flash_attention(heads_TNd: Tensor, heads: int, kv_heads: int, lengths: tuple[int, ...]) -> Tensor:
    """Causal attention inside each sequence; arguments and result as `ops.attention.self_attention`, bfloat16 only."""
    return _FlashAttention.apply(heads_TNd, (heads, kv_heads, kv_heads), lengths)  # type: ignore[no-any-return]


def _parts(heads_TNd: Tensor, sizes: tuple[int, int, int], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Views of q, k and v, with a batch axis where all sequences are of one length."""
    parts = heads_TNd.split(sizes, dim=1)
    if len(set(lengths)) > 1:
        return parts
    return tuple(part.view(len(lengths), lengths[0], *part.shape[1:]) for part in parts)


@lru_cache(maxsize=64)  # every layer of a step asks for the same borders
def _borders(lengths: tuple[int, ...], index: int) -> Tensor:
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return borders.to(f"cuda:{index}", non_blocking=True)


def _packed(lengths: tuple[int, ...], index: int) -> dict[str, Any]:
    if len(set(lengths)) == 1:
        return {}
    borders, longest = _borders(lengths, index), max(lengths)
    return {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": longest, "max_seqlen_k": longest}
