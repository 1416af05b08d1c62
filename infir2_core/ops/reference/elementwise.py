"""RMSNorm, SwiGLU and rotary embedding, forward and backward, as plain functions.

Each computes in float32 and rounds once to the dtype of its input, where an unfused kernel would store.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_rstd(x: Tensor, delta: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta (x itself without delta) and 1 / sqrt(mean of squares + eps) of each row.

    Args:
        x: [T, D].
        delta: [T, D] or None.
        eps: of the norm.

    Returns:
        [T, D] in the dtype of x, and float32 [T].
    """
    total = x if delta is None else x + delta
    return total, torch.rsqrt(total.float().square().mean(-1) + eps)


def norm(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """x * rstd * weight in the dtype of x; the float32 weight [D] is rounded to that dtype before use."""
    return (x.float() * rstd[:, None]).mul_(weight.to(x.dtype).float()).to(x.dtype)


def norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient of `norm` for x, plus the gradient `residual` that arrives beside it, and the weight's (float32 [D])."""
    grad32, normed = grad.float(), x.float() * rstd[:, None]
    grad_weight = (grad32 * normed).sum(0)
    grad_normed = grad32 * weight.to(x.dtype).float()
    projection = (grad_normed * normed).mean(-1, keepdim=True)
    grad_x = (grad_normed - normed * projection).mul_(rstd[:, None]).to(x.dtype)
    return grad_x if residual is None else grad_x + residual, grad_weight


def swiglu_product(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for a [T, 2F] tensor that holds gate, then up. Returns [T, F]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient [T, 2F] of `swiglu_product` from that of its output [T, F]."""
    gate, up = gate_up.float().chunk(2, -1)
    grad32, sigmoid, half = grad.float(), torch.sigmoid(gate), gate.shape[-1]
    silu = gate * sigmoid
    out = torch.empty_like(gate_up)
    out[..., :half] = grad32 * up * (sigmoid + silu * (1 - sigmoid))
    out[..., half:] = grad32 * silu
    return out


def rope_tables(positions_T: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position x base**(-2i / head_dim), float32 [T, head_dim / 2] each."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_T.device) / head_dim)
    angle = positions_T.double()[:, None] * frequency[None, :]
    return angle.cos().float(), angle.sin().float()


def rope_heads(heads_THd: Tensor, bias: Tensor, cos_T: Tensor, sin_T: Tensor, rotated: int) -> Tensor:
    """heads + bias, where each of the first `rotated` heads of a token is turned by rotary embedding: its (first half,
    second half) pairs, the layout Qwen2 uses.

    Args:
        heads_THd: [T, heads, head_dim]; queries, then keys, then values.
        bias: float32 [heads * head_dim], rounded to the dtype of the heads before use.
        cos_T: float32 [T, head_dim / 2].
        sin_T: likewise.
        rotated: query and key heads.
    """
    biased = heads_THd.float() + bias.to(heads_THd.dtype).float().view(heads_THd.shape[1:])
    return _turned(biased, cos_T, sin_T, rotated).to(heads_THd.dtype)


def rope_heads_backward(grad_THd: Tensor, cos_T: Tensor, sin_T: Tensor, rotated: int) -> tuple[Tensor, Tensor]:
    """Gradients of `rope_heads` for the heads and, float32 [heads * head_dim], for the bias."""
    grad = _turned(grad_THd.float(), cos_T, -sin_T, rotated).to(grad_THd.dtype)
    return grad, grad.sum(0, dtype=torch.float32).flatten()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    low, high = x[:, :rotated].chunk(2, -1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([torch.cat([low * cos - high * sin, high * cos + low * sin], -1), x[:, rotated:]], 1)
