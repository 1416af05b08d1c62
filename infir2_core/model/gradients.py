"""How the gradient of a parameter adds up over microbatches and ranks: in float32, or in bfloat16 (`main_grad`).

A bfloat16 gradient begins as the first contribution, rounded to nearest; every further one is added in float32 and the
sum is rounded stochastically, because rounding to nearest loses what is smaller than half a step of the sum. The random
bits depend on the parameter, the optimizer step, the rank and the number of the contribution (ops/reference/
stochastic.py), so that a resumed run repeats them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..ops.reference.stochastic import key, round_bf16
from ..ops.update import accumulate_

REDUCED = 0xFFFFFFFF  # stands for the sum over ranks where a rank's number stands otherwise


@dataclass
class Rounding:
    """Where a parameter's bfloat16 gradient stands: the optimizer step and contributions since it began."""

    salt: int
    step: int = 0
    rank: int = 0
    added: int = 0


def keep_bf16(name: str, parameter: nn.Parameter) -> None:
    """From now on the gradient of this parameter is bfloat16."""
    parameter.grad_dtype = torch.bfloat16
    parameter.rounding = Rounding(zlib.crc32(f"grad/{name}".encode()))  # type: ignore[attr-defined]


def begin_step(parameters: Iterable[nn.Parameter], step: int, rank: int) -> None:
    """To be called before the first microbatch of optimizer step `step`, counted from any number but never repeated."""
    for parameter in parameters:
        if (rounding := _rounding(parameter)) is not None:
            rounding.step, rounding.rank, rounding.added = step, rank, 0


def accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """Adds to the parameter's gradient, unless it is frozen; the first one is taken as it is, in the gradient's dtype.

    Autograd would do the same with what a backward returns, but copies a first gradient that Python still refers to.
    """
    if not parameter.requires_grad:
        return
    rounding = _rounding(parameter)
    if parameter.grad is None:
        parameter.grad = grad.to(parameter.grad_dtype)
    elif rounding is None:
        parameter.grad.add_(grad)
    else:
        rounding.added += 1
        word = key(rounding.salt, rounding.step, rounding.rank, rounding.added)
        accumulate_(parameter.grad, grad, word)


def float_sum(parameter: nn.Parameter) -> Tensor | None:
    """The gradient so far, where an op may add to it itself: float32, and there already."""
    return parameter.grad if _plain(parameter) else None


def sum_over_ranks(parameters: Iterable[nn.Parameter], add: Callable[[Iterable[Tensor]], None]) -> None:
    """Sums gradients over ranks in float32; those of bfloat16 are rounded to nearest first and stochastically after.

    Args:
        parameters: all of them, in the same order on every rank.
        add: sums tensors over ranks, in place.
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.dtype == torch.float32:
            add([parameter.grad])
            continue
        total = parameter.grad.float()
        add([total])
        rounding = _rounding(parameter)
        word = key(rounding.salt, rounding.step, REDUCED) if rounding is not None else 0
        parameter.grad.copy_(round_bf16(total, word))


class _Receiver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter) -> Tensor:
        ctx.parameter = parameter
        return torch.empty((), dtype=torch.float32, device=parameter.device).expand(parameter.shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> None:
        accumulate(ctx.parameter, grads[0])


def receiver(parameter: nn.Parameter) -> Tensor:
    """What an op that returns a float32 gradient takes for this parameter, of its shape and without values of its own.

    Autograd would round that gradient to the dtype of a bfloat16 parameter, and add in it. A parameter that is float32
    in weight and gradient stands for itself.
    """
    return parameter if _plain(parameter) else _Receiver.apply(parameter)  # type: ignore[no-any-return]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, holder: list[nn.Parameter], dtype: torch.dtype) -> Tensor:
        (weight,) = holder
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        return nn.functional.embedding(tokens, weight.detach()).to(dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        if _plain(weight) and weight.grad is not None:
            # Only the rows in use; a tied head has left its gradient there already.
            weight.grad.index_add_(0, tokens, grads[0].float())
        else:
            rows = len(weight)
            accumulate(weight, torch.ops.aten.embedding_dense_backward(grads[0].float(), tokens, rows, -1, False))
        return None, None, None, None


def embedding(tokens_T: Tensor, weight_VD: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding in `dtype`, [T, D]; gradients of a token's row add up in float32."""
    # Autograd must not know the weight here: it would hold a tied head's gradient back until this backward is done.
    anchor = torch.empty(0, device=weight_VD.device, requires_grad=weight_VD.requires_grad)
    return _Embedding.apply(anchor, tokens_T, [weight_VD], dtype)  # type: ignore[no-any-return]


def _plain(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.float32 and parameter.grad_dtype == torch.float32


def _rounding(parameter: nn.Parameter) -> Rounding | None:
    return getattr(parameter, "rounding", None)
