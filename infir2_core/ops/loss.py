"""LM head and weighted cross-entropy of training: the gradient is made in the forward, chunk by chunk.

A chunk of logits is turned into its own gradient where it lies and enters dgrad and wgrad at once, so that the head
costs three GEMMs and not four, and [T, V] never exists. The weights of the tokens are therefore part of the op.
Logits are stored in the dtype of the hidden states (bf16 in a bf16 recipe), the softmax is float32.
`reference.loss.linear_logprob` is the form with float32 logits and any gradient, for evaluation and scoring.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import dispatch
from .reference.loss import softmax_gradient_
from .reference.matmul import matmul

CHUNK_BYTES = 5 << 29  # logits of one chunk: 2.5 GiB


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, head: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        grad_x, grad_weight = torch.empty_like(x), None
        for rows in _chunks(x, head):
            logits = matmul(x[rows], head, x.dtype)
            logprobs[rows] = _softmax_gradient_(logits, targets[rows], weights[rows])
            grad_x[rows] = matmul(logits, head.T, x.dtype)
            part = matmul(logits.T, x[rows].T, torch.float32)
            grad_weight = part if grad_weight is None else grad_weight.add_(part)
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
    x_TD: Tensor, weight_VD: Tensor, head_VD: Tensor, targets_T: Tensor, weights_T: Tensor
) -> tuple[Tensor, Tensor]:
    """-sum(weights * log softmax(x . head^T)[target]), and the log-probabilities.

    Args:
        x_TD: final hidden states, bfloat16 or float32.
        weight_VD: float32 master weight that receives the gradient.
        head_VD: the same weight in the dtype of x, as the GEMM uses it.
        targets_T: int64 ids.
        weights_T: float32, 0 for tokens that are not trained on.

    Returns:
        float32 scalar with gradients to `x_TD` and `weight_VD`; float32 [T] without.
    """
    return _LinearCrossEntropy.apply(x_TD, weight_VD, head_VD, targets_T, weights_T)  # type: ignore[no-any-return]


def _softmax_gradient_(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    if dispatch.fast(logits) and logits.dtype == torch.bfloat16:
        from .hopper.loss import softmax_gradient_ as kernel

        return kernel(logits, targets, weights)
    return softmax_gradient_(logits, targets, weights)


def _chunks(x: Tensor, head: Tensor) -> list[slice]:
    tokens = x.shape[0]
    # Without the kernel, the softmax makes two float32 copies of the chunk.
    element = x.element_size() + (0 if dispatch.fast(x) else 8)
    count = -(-tokens * head.shape[0] * element // CHUNK_BYTES)
    size = max(1, -(-tokens // max(1, count)))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
