"""One AdamW update of a matrix whose state is stored in few bits: decode, update in float32, encode, in one pass.

A kernel that does the same in one read and one write per tensor has the signature of `adam_`. Every line of the
arithmetic below is one float32 operation, rounded once; constants are rounded to float32 before use.

    g = grad factor
    m = m beta1 + g (1 - beta1)
    v = v beta2 + (g g) (1 - beta2)
    p = p keep - (m / (sqrt(v) unbias + eps)) size

with keep = 1 - lr wd, size = lr / (1 - beta1**t) and unbias = 1 / sqrt(1 - beta2**t): AdamW of arXiv 1711.05101. One
division an element; the others are by numbers of the whole update, whose inverses are taken once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...precision.spec import QSpec
from .moments import BLOCK, decode_moment, encode_moment, fits, join, split, sqrt
from .stochastic import key

PIECE = 1 << 24  # elements updated at a time, which bounds the float32 temporaries


@dataclass
class Moment:
    """A stored moment of a matrix [R, C].

    Attributes:
        data: float32 or bfloat16 values (rounded to nearest even), or E4M3 codes.
        scale: float32 [R, C / 128] decode scales of codes.
        spec: of codes.
        salt: tells the random bits of this tensor from those of others.
    """

    data: Tensor
    scale: Tensor | None
    spec: QSpec | None
    salt: int

    @staticmethod
    def zeros(like: Tensor, form: str | QSpec, salt: int) -> Moment:
        """A moment of zeros for a parameter: in `form`, or in float32 where the form does not fit its shape.

        Vectors are float32 in every form; matrices too in E4M3, when 128 does not divide their last dimension.
        """
        if isinstance(form, QSpec) and fits(like.shape):
            codes = torch.zeros(like.shape, dtype=torch.float8_e4m3fn, device=like.device)
            return Moment(codes, like.new_ones(len(like), like.shape[1] // BLOCK, dtype=torch.float32), form, salt)
        dtype = torch.bfloat16 if form == "bf16" and like.dim() == 2 else torch.float32
        return Moment(torch.zeros_like(like, dtype=dtype), None, None, salt)

    def read(self, rows: slice = slice(None)) -> Tensor:
        """float32 values of some rows."""
        if self.spec is None or self.scale is None:
            return self.data[rows].float()
        return decode_moment(self.data[rows], self.scale[rows], self.spec)

    def write(self, values: Tensor, rows: slice, number: Tensor, skipped: Tensor) -> None:
        """Stores float32 values of some rows, unless `skipped`; the random bits are those of step `number`."""
        if self.spec is None or self.scale is None:
            _put(self.data[rows], values.to(self.data.dtype), skipped)
            return
        start = rows.start * self.data.shape[1]
        codes, scale = encode_moment(values, self.spec, key(self.salt, number), start)
        _put(self.data[rows].view(torch.uint8), codes.view(torch.uint8), skipped)
        _put(self.scale[rows], scale, skipped)


@dataclass
class Slot:
    """A parameter and its state.

    Attributes:
        weight: [R, C], the float32 master, or with a remainder its bfloat16 half.
        remainder: int16 [R, C] or None: `moments.split`.
        m: the mean of gradients.
        v: the mean of their squares.
    """

    weight: Tensor
    remainder: Tensor | None
    m: Moment
    v: Moment


@dataclass(frozen=True)
class Step:
    """Numbers of one update; the tensors are scalars on the device, so that nothing waits for the host.

    Attributes:
        beta1, beta2, eps: of AdamW.
        keep: 1 - lr * weight_decay.
        size: float32, lr / (1 - beta1**t), computed in float64.
        unbias: float32, 1 / sqrt(1 - beta2**t), computed in float64.
        factor: float32, of gradients: what clipping by global norm asks for.
        skipped: bool; nothing is stored.
        number: int64, t: updates made, this one included.
    """

    beta1: float
    beta2: float
    eps: float
    keep: float
    size: Tensor
    unbias: Tensor
    factor: Tensor
    skipped: Tensor
    number: Tensor


def adam_(slot: Slot, grad: Tensor, step: Step) -> None:
    """Updates a slot in place.

    Args:
        slot: of a matrix.
        grad: float32 or bfloat16 [R, C].
        step: numbers of the update.
    """
    count = max(1, PIECE // slot.weight.shape[1])
    for first in range(0, len(slot.weight), count):
        rows = slice(first, first + count)
        g = grad[rows].float() * step.factor
        m = slot.m.read(rows) * step.beta1 + g * (1 - step.beta1)
        v = slot.v.read(rows) * step.beta2 + (g * g) * (1 - step.beta2)
        weight, remainder = slot.weight[rows], None if slot.remainder is None else slot.remainder[rows]
        p = weight if remainder is None else join(weight, remainder)
        p = p * step.keep - (m / (sqrt(v) * step.unbias + step.eps)) * step.size
        if remainder is None:
            _put(weight, p, step.skipped)
        else:
            upper, lower = split(p)
            _put(weight, upper, step.skipped)
            _put(remainder, lower, step.skipped)
        slot.m.write(m, rows, step.number, step.skipped)
        slot.v.write(v, rows, step.number, step.skipped)


def _put(target: Tensor, value: Tensor, skipped: Tensor) -> None:
    target.copy_(torch.where(skipped, target, value))
