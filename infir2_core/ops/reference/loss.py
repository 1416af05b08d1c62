"""LM head and log-probabilities in one op: the full [T, V] logits never exist, only a chunk of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...precision.spec import QuantPlan
from .matmul import Operand, matmul
from .quantize import quantize, shifted

CHUNK_ELEMENTS = 1 << 28  # logits of one chunk: 1 GiB of float32
BLOCK = 128  # tokens of a chunk divide by this where they are quantised, so that chunks cut no block


@dataclass(frozen=True)
class Head:
    """The head as its GEMMs read it: logits = x . w^T, their gradients g . w and g^T . x.

    Attributes:
        fprop: weight [V, D].
        dgrad: weight [D, V]; None where no backward follows.
        x: copies of the hidden states, row for the logits, col for the weight's gradient; None in it: as they are.
        g: copies of the gradient of the logits, row for that of the hidden states, col for that of the weight.
        counter: int64 scalar on the device, to which infinities and NaNs of what is quantised are added; None: not
            counted.
    """

    fprop: Operand
    dgrad: Operand | None
    x: QuantPlan = QuantPlan()
    g: QuantPlan = QuantPlan()
    counter: Tensor | None = None

    @staticmethod
    def of(weight: Tensor | Head) -> Head:
        """A weight [V, D] in the dtype of the hidden states as an unquantised head."""
        return weight if isinstance(weight, Head) else Head(weight, weight.T)

    @property
    def quantises(self) -> bool:
        """Whether copies are made of the hidden states or of the logits' gradient."""
        return any(spec is not None for plan in (self.x, self.g) for spec in (plan.row, plan.col))

    @property
    def vocab(self) -> int:
        """Rows of the weight."""
        return self.fprop.shape[0] if isinstance(self.fprop, Tensor) else self.fprop.codes.shape[0]

    def dgrad_weight(self) -> Operand:
        """The weight [D, V].

        Raises:
            ValueError: the head was made for a forward alone.
        """
        if self.dgrad is None:
            raise ValueError("this head was made without the copy that a backward reads")
        return self.dgrad


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, head: Head, targets: Tensor) -> Tensor:
        logprobs = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        norms = torch.empty_like(logprobs)
        for rows in _chunks(x, head):
            logits = float_logits(x[rows], head)
            norms[rows] = torch.logsumexp(logits, -1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - norms[rows]
        ctx.head = head
        ctx.save_for_backward(x, targets, norms)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, targets, norms = ctx.saved_tensors
        head: Head = ctx.head
        seen = replace(head, counter=None)  # the hidden states were counted in the forward
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros(head.vocab, x.shape[1], dtype=torch.float32, device=x.device)
        for rows in _chunks(x, head):
            # d logprob_t / d logits = onehot(target) - softmax
            grad_logits = float_logits(x[rows], seen).sub_(norms[rows, None]).exp_().neg_()
            grad_logits.scatter_add_(1, targets[rows, None], torch.ones_like(norms[rows, None]))
            grad_logits = grad_logits.mul_(grads[0][rows, None]).to(x.dtype)
            g_row, g_col = _operands(grad_logits, head.g, head.counter)
            grad_x[rows] = matmul(g_row, head.dgrad_weight(), x.dtype)
            grad_weight += matmul(g_col, _operands(x[rows], head.x, None)[1], torch.float32)
        return grad_x, grad_weight, None, None


def float_logits(x: Tensor, head: Head) -> Tensor:
    """x . w^T in float32, [T, V]; x [T, D] is quantised as the head says."""
    return matmul(_operands(x, QuantPlan(row=head.x.row), head.counter)[0], head.fprop, torch.float32)


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


def _operands(source: Tensor, plan: QuantPlan, counter: Tensor | None) -> tuple[Operand, Operand]:
    """Row and column operand of a tensor [R, C]; itself where the plan names no copy."""
    shifts = plan.col is not None and plan.col.shifts_from(plan.row)
    row, col, wanted = source, source.T, QuantPlan(row=plan.row, col=None if shifts else plan.col)
    if wanted.row is None and wanted.col is None:
        return row, col
    made = quantize(source, wanted)
    if counter is not None:
        counter += made.nonfinite
    if shifts and made.row is not None and plan.col is not None:
        return made.row, shifted(made.row, plan.col)
    return (made.row if made.row is not None else row), (made.col if made.col is not None else col)


def _chunks(x: Tensor, head: Head) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // head.vocab)
    if head.quantises:
        size = max(BLOCK, size // BLOCK * BLOCK)
    return [slice(start, min(start + size, x.shape[0])) for start in range(0, x.shape[0], size)]


def linear_logprob(x_TD: Tensor, weight_VD: Tensor, head: Tensor | Head, targets_T: Tensor) -> Tensor:
    """log softmax(x . head^T)[target] for each token.

    Args:
        x_TD: final hidden states, bfloat16 or float32.
        weight_VD: float32 master weight that receives the gradient.
        head: the same weight as the GEMMs use it: [V, D] in the dtype of x, or quantised.
        targets_T: int64 ids.

    Returns:
        float32 [T]; gradients flow to `x_TD` (its dtype) and `weight_VD` (float32).
    """
    return _LinearLogprob.apply(x_TD, weight_VD, Head.of(head), targets_T)  # type: ignore[no-any-return]
