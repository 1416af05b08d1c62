"""Chooses how gradients, weights and their optimizer state are updated: by Hopper kernels or by the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import fast
from .reference.adam import Slot, Step
from .reference.adam import adam_ as reference
from .reference.matmul import Operand
from .reference.quantize import QTensor
from .reference.stochastic import round_bf16


@dataclass(frozen=True)
class Prepared:
    """A weight as GEMMs read it.

    Attributes:
        operand: row copy, or the weight in bfloat16.
        nonfinite: int64 scalar, to which infinities and NaNs are added when it is quantised.
    """

    operand: Operand
    nonfinite: Tensor


def has_kernel(weight: Tensor) -> bool:
    """Whether the kernel updates this parameter, whatever the forms of its state."""
    if not fast(weight):
        return False
    from .hopper.weights import supports

    return supports(weight)


def accumulate_(total: Tensor, addend: Tensor, key: int) -> None:
    """Adds to a bfloat16 gradient in float32 and rounds the sum stochastically, in place.

    Args:
        total: bfloat16.
        addend: float32 or bfloat16 of its shape.
        key: from `reference.stochastic.key`.
    """
    if fast(total) and total.is_contiguous() and total.numel() % 8 == 0:
        from .hopper import weights

        weights.accumulate_(total, addend, key)
    else:
        total.copy_(round_bf16(total.float() + addend, key))


def update_(slot: Slot, grad: Tensor, step: Step, scalars: Tensor, prepared: Prepared | None) -> bool:
    """Updates a slot in place, as `reference.adam.adam_`.

    Args:
        slot: of a matrix.
        grad: float32 or bfloat16 [R, C].
        step: numbers of the update.
        scalars: float32 [4]: size, unbias, factor and skipped of `step`.
        prepared: of the old weight, to be overwritten with that of the new one; None: there is none.

    Returns:
        Whether `prepared` now holds the new weight.
    """
    if not has_kernel(slot.weight):
        reference(slot, grad, step)
        return False
    from .hopper import gemm, weights

    fits, operand = False, None if prepared is None else prepared.operand
    if isinstance(operand, QTensor):
        block = (weights.TILE, weights.TILE)
        fits = operand.spec.block_scaled and operand.spec.block == block and gemm.laid_out(operand)
    elif operand is not None:
        fits = operand.dtype == torch.bfloat16
    counter = prepared.nonfinite if prepared is not None else None
    weights.adam_(slot, grad, step, scalars, operand if fits else None, counter)
    return fits
