"""The vocabulary of low precision: number formats and how one GEMM operand is quantised.

A leaf of the import graph: plain frozen data that recipes are written in and that `ops` reads. Nothing here computes on
tensors. Terms, as the field uses them:

- *format*: the set of values a code can take (`e4m3`: 1 sign, 4 exponent, 3 mantissa bits).
- *block*: the group of elements that share one scale, seen with the contraction axis of the GEMM last. `[1, 128]` is
  128 elements along the contraction of one row, `[128, 128]` a square, `row` the whole contraction axis, `tensor`
  everything.
- *encode scale* multiplies a value before the cast; the *decode scale* that is stored is its inverse.
- *amax*: the largest magnitude in a block.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Data(BaseModel):
    """Immutable plain data that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Format(Data):
    """A number format of one sign bit and either exponent and mantissa bits or integer bits.

    `specials`: `none` (every code is a number), `nan` (the all-ones code is NaN, no infinity: OCP E4M3) or `ieee` (the
    top exponent holds infinity and NaN: OCP E5M2).
    """

    name: str
    kind: Literal["float", "int"]
    exponent: int = Field(ge=0)
    mantissa: int = Field(ge=0)
    bias: int = 0
    specials: Literal["none", "nan", "ieee"] = "none"

    @property
    def bits(self) -> int:
        """Bits of one code, the sign included."""
        return 1 + self.exponent + self.mantissa

    @property
    def max(self) -> float:
        """The largest finite magnitude (448 for E4M3, 57344 for E5M2, 6 for E2M1, 127 for INT8)."""
        return max(v for v in self.values() if math.isfinite(v))

    @cache  # noqa: B019 - a handful of formats exist, all of them for ever
    def values(self) -> tuple[float, ...]:
        """The value of every code 0 .. 2**bits - 1 (sign bit highest), NaN and infinities included."""
        if self.kind == "int":
            half = 1 << (self.bits - 1)
            # Symmetric: the most negative two's complement code is never produced, and decodes to -max.
            return tuple(float(max(c if c < half else c - 2 * half, 1 - half)) for c in range(2 * half))
        positive = [self._decode(code) for code in range(1 << (self.bits - 1))]
        return tuple(positive + [-v for v in positive])

    def _decode(self, code: int) -> float:
        exponent, mantissa = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        top, full = (1 << self.exponent) - 1, (1 << self.mantissa) - 1
        if self.specials == "ieee" and exponent == top:
            return math.inf if mantissa == 0 else math.nan
        if self.specials == "nan" and exponent == top and mantissa == full:
            return math.nan
        fraction = mantissa / (1 << self.mantissa)
        if exponent == 0:
            return math.ldexp(fraction, 1 - self.bias)
        return math.ldexp(1.0 + fraction, exponent - self.bias)


@cache
def parse_format(name: str) -> Format:
    """`e4m3`, `e5m2` (both OCP), any other `eXmY`, or `intN`.

    Other minifloats than the two OCP FP8 formats have no special codes and the bias 2**(X-1) - 1, as OCP MX E2M1, E3M2
    and E2M3 do.

    Raises:
        ValueError: the name is none of these.
    """
    if match := re.fullmatch(r"int([2-8])", name):
        return Format(name=name, kind="int", exponent=0, mantissa=int(match[1]) - 1)
    if match := re.fullmatch(r"e(\d)m(\d)", name):
        e, m = int(match[1]), int(match[2])
        if not 1 <= e <= 8 or m > 7:
            raise ValueError(f"format '{name}': 1 to 8 exponent bits and 0 to 7 mantissa bits")
        specials: Literal["none", "nan", "ieee"]
        specials = "nan" if name == "e4m3" else "ieee" if name == "e5m2" or e == 8 else "none"
        return Format(name=name, kind="float", exponent=e, mantissa=m, bias=(1 << (e - 1)) - 1, specials=specials)
    raise ValueError(f"format '{name}' is neither eXmY nor intN")


class Transform(Data):
    """A change of basis before quantisation: `hadamard` (of `size` along `axis`), `power` (the magnitude to `exponent`;
    without one, to an exponent that each block chooses: COAT), `smooth`, `logmap`.
    """

    kind: Literal["hadamard", "power", "smooth", "logmap"]
    size: int = 0
    axis: Literal["contraction", "token", "block"] = "contraction"
    sign: Literal["none", "fixed", "per_step"] = "none"
    undo: Literal["cancels", "post_gemm", "on_read"] = "cancels"
    exponent: float | None = Field(None, gt=0)


Block = Literal["tensor", "row"] | tuple[int, int]
Scale = Literal["pow2", "fp32", "e8m0", "e4m3+fp32", "none"]


class QSpec(Data):
    """How one operand of one GEMM (or one saved tensor, or one optimizer state) is stored in few bits.

    Scale rules, for a block with magnitude amax and a format with largest value M:

    - `fp32`: encode scale M / amax.
    - `pow2`: the same rounded down to a power of two; stored as float32 (TransformerEngine's blockwise default).
    - `e8m0`: decode scale amax / M rounded up to a power of two, in E8M0 (OCP MX element).
    - `e4m3+fp32`: E4M3 scales per block under one float32 scale per tensor (NVFP4).
    - `none`: encode scale 1.

    `from` says what a copy is made of. `source`: the tensor itself. `codes_shift`: the codes of the row copy, each
    divided by the power of two that takes it to the coarsest scale of the rows in its block. The others of published
    systems have no implementation.
    """

    format: str
    block: Block = "tensor"
    scale: Scale = "fp32"
    amax: Literal["current", "delayed", "static", "two_stage", "std", "mse"] = "current"
    history: int = Field(0, ge=0, description="delayed: optimizer steps looked back on")
    margin: int = Field(0, description="delayed: the encode scale is divided by 2**margin")
    static_amax: float | None = Field(None, gt=0)
    std_factor: float | None = Field(None, gt=0, description="std: clip at this many standard deviations")
    headroom: float = Field(1.0, gt=0, le=1, description="share of the format's largest value that amax is mapped to")
    rounding: Literal["rne", "stochastic", "truncate", "learned"] = "rne"
    clip: Literal["saturate", "masked_ste"] = "saturate"
    transforms: tuple[Transform, ...] = ()
    origin: Literal["source", "codes_shift", "codes_requant", "reuse"] = Field("source", alias="from")

    @model_validator(mode="after")
    def _check(self) -> QSpec:
        parse_format(self.format)
        if not isinstance(self.block, str) and min(self.block) < 1:
            raise ValueError(f"block {list(self.block)} must be positive")
        if (self.amax == "delayed") != (self.history > 0):
            raise ValueError("amax = 'delayed' and history > 0 go together")
        if (self.amax == "static") != (self.static_amax is not None):
            raise ValueError("amax = 'static' and static_amax go together")
        if (self.amax == "std") != (self.std_factor is not None):
            raise ValueError("amax = 'std' and std_factor go together")
        return self

    @property
    def stateful(self) -> bool:
        """Whether quantising needs a state that outlives the step (the amax history of delayed scaling)."""
        return self.amax == "delayed"

    @property
    def root(self) -> bool:
        """Whether the square root is what is stored, and squared on read."""
        return any(t.kind == "power" and t.exponent == 0.5 and t.undo == "on_read" for t in self.transforms)

    @property
    def transposes(self) -> bool:
        """Whether the codes of the transpose are the transposed codes: one scale for the tensor, or square blocks."""
        return self.block == "tensor" or (not isinstance(self.block, str) and self.block[0] == self.block[1])

    @property
    def block_scaled(self) -> bool:
        """Whether Hopper's block-scaled GEMMs take such codes: FP8 in 1x128 or 128x128 blocks, float32 scales."""
        plain = self.amax == "current" and self.rounding == "rne" and self.headroom == 1.0 and not self.transforms
        return (
            plain
            and self.format in ("e4m3", "e5m2")
            and self.block in ((1, 128), (128, 128))
            and self.scale in ("pow2", "fp32")
            and self.origin == "source"
        )

    def shifts_from(self, row: QSpec | None) -> bool:
        """Whether this is a column copy that can be made by shifting the codes of the row copy `row`: power-of-two
        scales, blocks of 1 x B in `row`, of 1 x any or B x any in this copy.
        """
        if self.origin != "codes_shift" or row is None or isinstance(row.block, str) or isinstance(self.block, str):
            return False
        if row.block[0] != 1 or self.block[0] not in (1, row.block[1]):
            return False
        plain = all(s.amax == "current" and s.rounding == "rne" and not s.transforms for s in (self, row))
        plain = plain and self.headroom == row.headroom
        return plain and row.origin == "source" and self.scale == row.scale == "pow2" and self.format == row.format

    def label(self) -> str:
        """Short text for tables, for example `e4m3 1x128 pow2`."""
        block = self.block if isinstance(self.block, str) else f"{self.block[0]}x{self.block[1]}"
        parts = [self.format, block, self.scale if self.scale != "none" else "unscaled"]
        if self.amax != "current":
            parts.append(self.amax)
        if self.rounding != "rne":
            parts.append(self.rounding)
        if self.origin != "source":
            parts.append(self.origin)
        return " ".join(parts + [t.kind for t in self.transforms])


class QuantPlan(Data):
    """What one read of a source tensor must yield: a copy for its rows, one for its columns, or both.

    `row` is quantised along the last axis; `col` is the same quantiser applied to the transpose. None: not wanted.
    """

    row: QSpec | None = None
    col: QSpec | None = None
