"""The two stretches of a block whose backward passes are written out: norm + linear, and the whole feed-forward half.

Written out, because quantisation belongs to the op that makes a tensor: the gradient of gate_up is never stored in bf16
when both GEMMs that read it want codes, which autograd between the two ops could not know.

Gradients of weights are added to `.grad` here and not returned to autograd (torch.autograd.grad cannot ask for them).
A block passes the residual stream on as a pair (x, delta) whose sum nobody has computed yet: the next norm adds them in
the pass that computes its row statistic. Tensor letters as in decoder.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..ops import fused
from ..ops.reference.matmul import Operand
from .gradients import accumulate
from .linear import Linear, pack, unpack

Pair = tuple[Tensor, Tensor]


def _normed_columns(layer: Linear, ctx: Any, total: Tensor, rstd: Tensor, saved: list[Tensor]) -> Operand:
    """What wgrad reads of a norm's output: as it was saved, or made again."""
    if not layer.rebuilt_input:
        return layer.wgrad_input(unpack(ctx.meta, tuple(saved)))
    wanted = layer.wanted("x", row=False, counted=layer.operands.fprop_x is None)
    return layer.wgrad_input(layer.kept_input(fused.norm(total, rstd, ctx.norm, wanted)))


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm: nn.Parameter,
        weight: Tensor,
        layer: Linear,
        eps: float,
        training: bool,
    ) -> Pair:
        total, rstd = fused.add_rstd(x, delta, eps)
        made = fused.norm(total, rstd, norm, layer.wanted("x", col=not layer.rebuilt_input, training=training))
        if training:
            ctx.layer, ctx.added, ctx.norm = layer, delta is not None, norm
            ctx.meta, saved = (None, ()) if layer.rebuilt_input else pack(layer.kept_input(made))
            ctx.save_for_backward(total, rstd, *saved)
        # Without a delta the sum is x itself, and an input may not be returned as it is.
        return (total if delta is not None else total.view_as(total)), layer.fprop(made.row_operand(), training)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        layer: Linear = ctx.layer
        total, rstd, *saved = ctx.saved_tensors
        residual, grad = grads[0].contiguous(), grads[1].contiguous()
        g = fused.make(grad, layer.wanted("g"))
        grad_normed = layer.dgrad(g)
        layer.wgrad(g, _normed_columns(layer, ctx, total, rstd, saved))
        grad_x, grad_norm = fused.norm_backward(grad_normed, total, rstd, ctx.norm, residual)
        accumulate(ctx.norm, grad_norm)
        return grad_x, grad_x if ctx.added else None, None, None, None, None, None


def norm_linear(x_TD: Tensor, delta_TD: Tensor | None, norm: nn.Parameter, layer: Linear, eps: float) -> Pair:
    """x + delta, and layer(rmsnorm(x + delta)).

    Args:
        x_TD: residual stream.
        delta_TD: what the branch before wants added to it, or None.
        norm: float32 [D] weight.
        layer: the linear.
        eps: of the norm.
    """
    training = torch.is_grad_enabled()
    return _NormLinear.apply(x_TD, delta_TD, norm, layer.weight, layer, eps, training)  # type: ignore[no-any-return]


class _NormOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, norm: nn.Parameter, eps: float) -> Tensor:
        total, rstd = fused.add_rstd(x, delta, eps)
        ctx.save_for_backward(total, rstd)
        ctx.added, ctx.norm = delta is not None, norm
        return fused.norm(total, rstd, norm, fused.PLAIN).unquantised()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        total, rstd = ctx.saved_tensors
        grad_x, grad_norm = fused.norm_backward(grads[0].contiguous(), total, rstd, ctx.norm, None)
        accumulate(ctx.norm, grad_norm)
        return grad_x, grad_x if ctx.added else None, None, None


def norm_of_sum(x_TD: Tensor, delta_TD: Tensor | None, norm: nn.Parameter, eps: float) -> Tensor:
    """rmsnorm(x + delta)."""
    return _NormOfSum.apply(x_TD, delta_TD, norm, eps)  # type: ignore[no-any-return]


class _RopeHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, bias: nn.Parameter, cos: Tensor, sin: Tensor, head_dim: int, rotated: int
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.bias, ctx.sizes = bias, (head_dim, rotated)
        made = fused.rope(qkv.view(len(qkv), -1, head_dim), bias, cos, sin, rotated)
        if made.data_ptr() != qkv.data_ptr():
            return made.flatten(1)
        ctx.mark_dirty(qkv)
        return qkv

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        head_dim, rotated = ctx.sizes
        grad = grads[0].contiguous()  # concatenated for this op alone, so it may be changed
        grad, grad_bias = fused.rope_backward(grad.view(len(grad), -1, head_dim), cos, sin, rotated)
        accumulate(ctx.bias, grad_bias)
        return grad.flatten(1), None, None, None, None, None


def rope_qkv(qkv: Tensor, bias: nn.Parameter, cos_T: Tensor, sin_T: Tensor, head_dim: int, rotated: int) -> Tensor:
    """[T, heads, head_dim] of a projection [T, heads * head_dim] without its bias: that added, and the first `rotated`
    heads turned by rotary embedding, in place where a kernel can.
    """
    made = _RopeHeads.apply(qkv, bias, cos_T, sin_T, head_dim, rotated)
    return made.view(len(qkv), -1, head_dim)  # type: ignore[no-any-return]


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        norm: nn.Parameter,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        gate_up: Linear,
        down: Linear,
        eps: float,
        training: bool,
    ) -> Pair:
        total, rstd = fused.add_rstd(x, delta, eps)
        normed = fused.norm(total, rstd, norm, gate_up.wanted("x", col=not gate_up.rebuilt_input, training=training))
        gate_up_T2F = gate_up.fprop(normed.row_operand(), training)
        # The column copy of the product waits for the backward, which rebuilds the product anyway.
        kept = gate_up.kept_output() if training else fused.PLAIN
        product, left = fused.swiglu(gate_up_T2F, down.wanted("x", col=False, training=training), kept)
        if training:
            ctx.gate_up, ctx.down, ctx.norm = gate_up, down, norm
            ctx.meta, saved = (None, ()) if gate_up.rebuilt_input else pack(gate_up.kept_input(normed))
            ctx.kept, codes = pack(left)
            ctx.save_for_backward(total, rstd, *codes, *saved)
        return total, down.fprop(product.row_operand(), training)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate_up: Linear = ctx.gate_up
        down: Linear = ctx.down
        total, rstd, *saved = ctx.saved_tensors
        residual, grad = grads[0].contiguous(), grads[1].contiguous()
        kept, saved = (saved[:1], saved[1:]) if ctx.kept is None else (saved[:2], saved[2:])
        g = fused.make(grad, down.wanted("g"))
        grad_product = down.dgrad(g)
        again = down.wanted("x", row=False, counted=down.operands.fprop_x is None)
        inner, product = fused.swiglu_backward(grad_product, unpack(ctx.kept, tuple(kept)), gate_up.wanted("g"), again)
        down.wgrad(g, down.wgrad_input(down.kept_input(product)))
        del grad_product, product
        grad_normed = gate_up.dgrad(inner)
        gate_up.wgrad(inner, _normed_columns(gate_up, ctx, total, rstd, saved))
        grad_x, grad_norm = fused.norm_backward(grad_normed, total, rstd, ctx.norm, residual)
        accumulate(ctx.norm, grad_norm)
        return grad_x, grad_x, None, None, None, None, None, None, None


def feed_forward(x_TD: Tensor, delta_TD: Tensor, norm: nn.Parameter, gate_up: Linear, down: Linear, eps: float) -> Pair:
    """x + delta, and down(swiglu(gate_up(rmsnorm(x + delta)))). Arguments as `norm_linear`; no biases."""
    training = torch.is_grad_enabled()
    weights = (gate_up.weight, down.weight)
    return _FeedForward.apply(x_TD, delta_TD, norm, *weights, gate_up, down, eps, training)  # type: ignore[no-any-return]
