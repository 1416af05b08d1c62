"""RMSNorm, SwiGLU and rotary embedding with explicit backward passes.

Each computes in float32 and rounds once to the dtype of its input, where an unfused kernel would store. Each saves
only its input (and a row statistic), never a float32 intermediate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x32 * rstd).mul_(weight.to(x.dtype).float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        grad = grads[0].float()
        normed = x.float() * rstd
        grad_weight = (grad * normed).sum(0)
        grad_normed = grad * weight.to(x.dtype).float()
        projection = (grad_normed * normed).mean(-1, keepdim=True)
        return (grad_normed - normed * projection).mul_(rstd).to(x.dtype), grad_weight, None


def rmsnorm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    The float32 master weight is rounded to the dtype of x before use; its gradient is float32 [D].
    """
    return _RMSNorm.apply(x_TD, weight_D, eps)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.float().chunk(2, -1)
        grad = grads[0].float()
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        out = torch.empty_like(gate_up)
        half = gate.shape[-1]
        out[..., :half] = grad * up * (sigmoid + silu * (1 - sigmoid))
        out[..., half:] = grad * silu
        return out


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up for a [T, 2F] tensor that holds gate, then up. Returns [T, F]."""
    return _SwiGLU.apply(gate_up_TF)  # type: ignore[no-any-return]


def rope_tables(positions_T: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position x base**(-2i / head_dim), float32 [T, head_dim / 2] each."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_T.device) / head_dim)
    angle = positions_T.double()[:, None] * frequency[None, :]
    return angle.cos().float(), angle.sin().float()


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, -1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def rope(x_THd: Tensor, cos_T: Tensor, sin_T: Tensor) -> Tensor:
    """Rotates each head's (first half, second half) pairs, the layout Qwen2 uses. [T, H, head_dim] in and out."""
    return _Rope.apply(x_THd, cos_T, sin_T)  # type: ignore[no-any-return]
