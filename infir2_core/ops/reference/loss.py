"""LM head and log-probabilities in one op: the full [T, V] logits never exist, only a chunk of rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .matmul import matmul

CHUNK_ELEMENTS = 1 << 28  # logits of one chunk: 1 GiB of float32


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logprobs = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        norms = torch.empty_like(logprobs)
        for rows in _chunks(x, head):
            logits = matmul(x[rows], head, torch.float32)
            norms[rows] = torch.logsumexp(logits, -1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - norms[rows]
        ctx.save_for_backward(x, head, targets, norms)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, head, targets, norms = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros(head.shape, dtype=torch.float32, device=x.device)
        for rows in _chunks(x, head):
            # d logprob_t / d logits = onehot(target) - softmax
            grad_logits = matmul(x[rows], head, torch.float32).sub_(norms[rows, None]).exp_().neg_()
            grad_logits.scatter_add_(1, targets[rows, None], torch.ones_like(norms[rows, None]))
            grad_logits = grad_logits.mul_(grads[0][rows, None]).to(x.dtype)
            grad_x[rows] = matmul(grad_logits, head.T, x.dtype)
            grad_weight += matmul(grad_logits.T, x[rows].T, torch.float32)
        return grad_x, grad_weight, None, None


def softmax_gradient_(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """log softmax(logits)[target], float32 [T]; `logits` [T, V] becomes weights * (softmax - onehot), its gradient in
    -sum(weights * logprobs).

    Args:
        logits: any float dtype; overwritten.
        targets: int64 [T].
        weights: float32 [T].
    """
    logprobs_TV = torch.log_softmax(logits.float(), -1)
    chosen = logprobs_TV.gather(1, targets[:, None])
    gradient = logprobs_TV.exp_().scatter_add_(1, targets[:, None], torch.full_like(chosen, -1.0))
    logits.copy_(gradient.mul_(weights[:, None]))
    return chosen[:, 0]


def _chunks(x: Tensor, head: Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // head.shape[0])
    return [slice(start, min(start + size, x.shape[0])) for start in range(0, x.shape[0], size)]


def linear_logprob(x_TD: Tensor, weight_VD: Tensor, head_VD: Tensor, targets_T: Tensor) -> Tensor:
    """log softmax(x . head^T)[target] for each token.

    Args:
        x_TD: final hidden states, bfloat16 or float32.
        weight_VD: float32 master weight that receives the gradient.
        head_VD: the same weight in the dtype of x, as the GEMM uses it.
        targets_T: int64 ids.

    Returns:
        float32 [T]; gradients flow to `x_TD` (its dtype) and `weight_VD` (float32).
    """
    return _LinearLogprob.apply(x_TD, weight_VD, head_VD, targets_T)  # type: ignore[no-any-return]
