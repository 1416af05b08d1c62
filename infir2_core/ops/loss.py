"""LM head and weighted cross-entropy of training: the gradient is made in the forward, chunk by chunk.

A chunk of logits is turned into its own gradient where it lies and enters dgrad and wgrad at once, so that the head
costs three GEMMs and not four, and [T, V] never exists. The weights of the tokens are therefore part of the op.
Logits are stored in the dtype of the hidden states (bf16 in a bf16 recipe), the softmax is float32.
A quantised head (`reference.loss.Head`) quantises the hidden states and the gradient of the logits chunk by chunk;
chunks of a multiple of 128 tokens cut no block, so that their number changes no code.
`reference.loss.linear_logprob` is the form with float32 logits and any gradient, for evaluation and scoring.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..precision.spec import QuantPlan
from . import dispatch
from .fused import Wanted, make
from .reference.loss import BLOCK, Head, softmax_gradient_
from .reference.matmul import Operand, matmul
from .reference.quantize import QTensor

CHUNK_BYTES = 5 << 29  # logits of one chunk: 2.5 GiB


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, head: Head, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        grad_x, grad_weight = torch.empty_like(x), None
        for rows in _chunks(x, head):
            x_row, x_col = _operands(x[rows], head.x, head.counter)
            logits = _matmul(x_row, head.fprop, x.dtype)
            logprobs[rows] = _softmax_gradient_(logits, targets[rows], weights[rows])
            g_row, g_col = _operands(logits, head.g, head.counter)
            grad_x[rows] = _matmul(g_row, head.dgrad_weight(), x.dtype)
            grad_weight = _matmul(g_col, x_col, torch.float32, grad_weight)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(logprobs)
        return -(weights * logprobs).sum(), logprobs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        if grads[0].data_ptr() == one(grads[0].device).data_ptr():
            return grad_x, grad_weight, None, None, None
        # Not in place: whoever calls backward twice (retain_graph) must find them as they were.
        return grad_x * grads[0], grad_weight * grads[0], None, None, None


@cache
def one(device: torch.device) -> Tensor:
    """The float32 scalar 1 of a device: `loss.backward(one(device))` is `loss.backward()`, and known to be so.

    Multiplying the weight's gradient by 1 would read and write it once more.
    """
    return torch.ones((), device=device)


def linear_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, head: Tensor | Head, targets_T: Tensor, weights_T: Tensor
) -> tuple[Tensor, Tensor]:
    """-sum(weights * log softmax(x . head^T)[target]), and the log-probabilities.

    Args:
        x_TD: final hidden states, bfloat16 or float32.
        weight_VD: float32 master weight that receives the gradient.
        head: the same weight as the GEMMs use it: [V, D] in the dtype of x, or quantised.
        targets_T: int64 ids.
        weights_T: float32, 0 for tokens that are not trained on.

    Returns:
        float32 scalar with gradients to `x_TD` and `weight_VD`; float32 [T] without.
    """
    return _LinearCrossEntropy.apply(x_TD, weight_VD, Head.of(head), targets_T, weights_T)  # type: ignore[no-any-return]


def _operands(source: Tensor, plan: QuantPlan, counter: Tensor | None) -> tuple[Operand, Operand]:
    """Row and column operand of a tensor [R, C]; itself where the plan names no copy."""
    shift = plan.col if plan.col is not None and plan.col.shifts_from(plan.row) else None
    plain = plan.row is None or plan.col is None
    wanted = QuantPlan(row=plan.row, col=plan.col if shift is None else None)
    made = make(source, Wanted(wanted, plain, None, counter))
    if shift is not None and made.row is not None:
        return made.row, dispatch.shifted(made.row, shift)
    return made.row_operand(), made.col_operand()


def _matmul(a: Operand, b: Operand, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    """a . b^T, added to `total` if there is one. The ledger is told of GEMMs with a quantised operand."""
    if isinstance(a, QTensor) or isinstance(b, QTensor):
        return dispatch.matmul("head", a, b, dtype, total=total)
    made = matmul(a, b, dtype)
    return made if total is None else total.add_(made)


def _softmax_gradient_(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    if dispatch.fast(logits) and logits.dtype == torch.bfloat16:
        from .hopper.loss import softmax_gradient_ as kernel

        return kernel(logits, targets, weights)
    return softmax_gradient_(logits, targets, weights)


def _chunks(x: Tensor, head: Head) -> list[slice]:
    tokens = x.shape[0]
    # Without the kernel, the softmax makes two float32 copies of the chunk.
    element = x.element_size() + (0 if dispatch.fast(x) else 8) + 2 * head.quantises
    count = -(-tokens * head.vocab * element // CHUNK_BYTES)
    size = max(1, -(-tokens // max(1, count)))
    if head.quantises:
        size = -(-size // BLOCK) * BLOCK
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
