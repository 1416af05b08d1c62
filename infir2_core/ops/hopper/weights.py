"""Weights: AdamW with the quantisation of what it makes, and column copies turned on demand.

The update reads every stored form once, writes it once, and leaves the new weight in the form that the next step's
GEMMs read, so that no pass over the weights remains for casting or quantising (reference: ops/reference/adam.py, then
ops/reference/quantize.py). Only the row copy is kept: a square block's column copy has the same codes and scale, and
the backward turns them when it needs them, which costs half a bf16 read of the weight and saves a byte a parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.adam import Moment, Slot, Step
from ..reference.matmul import Operand
from ..reference.quantize import QTensor
from .copies import TILE, Copies, arguments, defines
from .cuda import Argument, launch

THREADS = 256
# Rows whose loads a thread issues together, and blocks of a multiprocessor, with and without codes of moments: measured
# on an H200 (benchmarks/LOG.md). Codes need many instructions, and so as many warps as registers allow.
TUNING = {True: (1, 4), False: (2, 2)}


def supports(weight: Tensor) -> bool:
    """Whether `adam_` takes a matrix of this shape, whatever its form."""
    return weight.dim() == 2 and weight.shape[0] % TILE == 0 and weight.shape[1] % TILE == 0


def adam_(
    slot: Slot, grad: Tensor, step: Step, scalars: Tensor, prepared: Operand | None, nonfinite: Tensor | None
) -> None:
    """`reference.adam.adam_`, and the new weight in the form of `prepared`, in place.

    Args:
        slot: of a matrix whose sides divide by 128.
        grad: float32 or bfloat16 [R, C].
        step: numbers of the update.
        scalars: float32 [4] on the device: size, unbias, factor and skipped of `step`.
        prepared: row copy in 128x128 blocks, or bfloat16 [R, C], that receives the new weight; None: not wanted.
        nonfinite: int64 scalar on the device, to which infinities and NaNs that are quantised are added; None only if
            nothing is.
    """
    rows, cols = slot.weight.shape
    row = prepared if isinstance(prepared, QTensor) else None
    copy = prepared if isinstance(prepared, Tensor) and prepared.data_ptr() != slot.weight.data_ptr() else None
    ahead, blocks = TUNING[slot.m.spec is not None or slot.v.spec is not None]
    constants = defines(row, None) | {
        "WIDE_GRAD": int(grad.dtype == torch.float32),
        "SPLIT": int(slot.remainder is not None),
        "M": _kind(slot.m),
        "V": _kind(slot.v),
        "ROOT": int(slot.v.spec is not None and slot.v.spec.root),
        "COPY": int(copy is not None),
        "AHEAD": ahead,
        "BLOCKS": blocks,
    }
    numbers = (step.beta1, 1 - step.beta1, step.beta2, 1 - step.beta2, step.eps, step.keep)
    fields: tuple[Argument, ...] = (
        slot.weight, slot.remainder, grad.contiguous(), _form(slot.m), _form(slot.v), copy, cols, arguments(row),
        nonfinite, scalars, step.number, *map(float, numbers),
    )  # fmt: skip
    tiles = rows // TILE * (cols // TILE)
    launch("adamw.cu", tuple(sorted(constants.items())), tiles, THREADS, 0, fields, slot.weight.device)


def accumulate_(total: Tensor, addend: Tensor, key: int) -> None:
    """total + addend, added in float32 and rounded stochastically: `round_bf16` of ops/reference/stochastic.py.

    Args:
        total: contiguous bfloat16, a multiple of 8 elements.
        addend: float32 or bfloat16 of its shape.
        key: of the rounding, below 2**32.
    """
    constants = (("E5M2", 0), ("POW2", 1), ("WIDE", int(addend.dtype == torch.float32)))
    blocks = -(-total.numel() // (8 * THREADS))
    fields: tuple[Argument, ...] = (total, addend.contiguous(), total.numel(), key)
    launch("accumulate.cu", constants, blocks, THREADS, 0, fields, total.device)


def transposed(q: QTensor) -> QTensor:
    """The column copy of a matrix in 128x128 blocks, contraction axis last, from its row copy [R, C]."""
    rows, cols = q.data.shape
    made = Copies.allocate((rows, cols), None, q.spec, q.data.device).col
    constants = tuple(sorted(defines(q, made).items()))
    tiles = rows // TILE * (cols // TILE)
    launch("transpose.cu", constants, tiles, THREADS, 0, (cols, arguments(q), arguments(made)), q.data.device)
    assert made is not None
    return made


def _kind(moment: Moment) -> int:
    if moment.spec is not None:
        return 2
    return 0 if moment.data.dtype == torch.float32 else 1


def _form(moment: Moment) -> tuple[Argument, ...]:
    return moment.data, moment.scale, moment.salt
