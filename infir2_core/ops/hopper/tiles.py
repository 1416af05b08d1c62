"""What every quantising kernel ends with: one 128 x 128 tile of bf16 values becomes codes and scales.

A tile holds whole blocks in both directions, so one read of it yields the row copy (1x128 blocks along the columns),
the column copy (1x128 blocks along the rows, stored transposed because Hopper's FP8 GEMM wants the contraction axis
contiguous) or both copies of a 128x128 block. The arithmetic is that of ops/reference/codes.py, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...precision.spec import QSpec, parse_format
from ..reference.codes import DTYPES
from ..reference.quantize import QTensor

TILE = 128
K_BLOCK_PAD = 4  # cuBLASLt reads 128x128 scales in groups of four along the contraction


@triton.jit
def encode_scale(amax, LIMIT: tl.constexpr, LIMIT_EXP: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr):
    """Encode and decode scale of a block from its amax (float32, no NaN): reference.codes.encode_scale."""
    plain = (amax == 0) | (amax == float("inf"))
    if POW2:
        bits = amax.to(tl.int32, bitcast=True)
        e = LIMIT_EXP - ((bits >> 23) - 127) - ((bits & 0x7FFFFF) > LIMIT_BITS).to(tl.int32)
        e = tl.where(plain, 0, tl.minimum(e, 127))
        encode = ((e + 127) << 23).to(tl.float32, bitcast=True)
        # 2**-127 has no exponent field of its own: it is the subnormal with the highest mantissa bit
        decode = tl.where(e < 127, (127 - e) << 23, 0x00400000).to(tl.float32, bitcast=True)
    else:
        encode = tl.minimum(tl.math.div_rn(LIMIT, tl.where(plain, LIMIT, amax)), 3.3895313892515355e38)
        decode = tl.math.div_rn(1.0, encode)
    return encode, decode


@triton.jit
def to_codes(scaled, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """Saturating round-to-nearest-even; a NaN stays one."""
    return tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def emit_tile(
    y,
    r0,
    c0,
    row_codes,
    row_scale,
    row_width,
    row_pitch,
    col_codes,
    col_scale,
    col_width,
    col_pitch,
    nonfinite,
    COUNT: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SQUARE: tl.constexpr,
    POW2: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_EXP: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
):
    """Writes the copies of tile y (float32 [128, 128], bf16 values) whose first element is (r0, c0) of the source.

    `row_width` and `col_width` are the contraction lengths of the copies, `row_pitch` and `col_pitch` the distance of
    neighbouring scales: along the contraction for 1x128 blocks, across it for 128x128 blocks. COUNT: add the infinities
    and NaNs of the tile to `nonfinite`.
    """
    i = tl.arange(0, 128)
    magnitude = tl.where(y == y, tl.abs(y), 0.0)
    if COUNT:
        bad = tl.sum(tl.sum(((y != y) | (magnitude == float("inf"))).to(tl.int32), 1), 0)
        if bad > 0:
            tl.atomic_add(nonfinite, bad.to(tl.int64))
    row_at = r0.to(tl.int64) * row_width + c0 + i[:, None] * row_width + i[None, :]
    col_at = c0.to(tl.int64) * col_width + r0 + i[:, None] * col_width + i[None, :]
    dtype: tl.constexpr = row_codes.dtype.element_ty if ROW else col_codes.dtype.element_ty
    if SQUARE:
        amax = tl.max(tl.max(magnitude, 1), 0)
        encode, decode = encode_scale(amax, LIMIT, LIMIT_EXP, LIMIT_BITS, POW2)
        codes = to_codes(y * encode, LIMIT, dtype)
        if ROW:
            tl.store(row_codes + row_at, codes)
            tl.store(row_scale + (r0 // 128) * row_pitch + c0 // 128, decode)
        if COL:
            tl.store(col_codes + col_at, tl.trans(codes))
            tl.store(col_scale + (c0 // 128) * col_pitch + r0 // 128, decode)
    else:
        if ROW:
            encode, decode = encode_scale(tl.max(magnitude, 1), LIMIT, LIMIT_EXP, LIMIT_BITS, POW2)
            tl.store(row_codes + row_at, to_codes(y * encode[:, None], LIMIT, dtype))
            tl.store(row_scale + (c0 // 128).to(tl.int64) * row_pitch + r0 + i, decode)
        if COL:
            encode, decode = encode_scale(tl.max(magnitude, 0), LIMIT, LIMIT_EXP, LIMIT_BITS, POW2)
            tl.store(col_codes + col_at, tl.trans(to_codes(y * encode[None, :], LIMIT, dtype)))
            tl.store(col_scale + (r0 // 128).to(tl.int64) * col_pitch + c0 + i, decode)


@dataclass(frozen=True)
class Copies:
    """Buffers for the copies of a [R, C] source, and the arguments that `emit_tile` takes for them."""

    row: QTensor | None
    col: QTensor | None
    spec: QSpec | None
    nonfinite: Tensor

    @staticmethod
    def allocate(shape: tuple[int, int], row: QSpec | None, col: QSpec | None, nonfinite: Tensor) -> Copies:
        """Uninitialised copies; every element is written by the kernel that gets them."""
        rows, cols = shape
        made = _empty(rows, cols, row, nonfinite.device) if row else None
        turned = _empty(cols, rows, col, nonfinite.device) if col else None
        return Copies(made, turned, row or col, nonfinite)

    def arguments(self) -> tuple[object, ...]:
        """row_codes, row_scale, row_width, row_pitch, col_codes, col_scale, col_width, col_pitch, nonfinite."""
        return (*_pointers(self.row, self.nonfinite), *_pointers(self.col, self.nonfinite), self.nonfinite)

    def constants(self) -> dict[str, object]:
        """The compile-time arguments of `emit_tile`."""
        if self.spec is None:
            names = ("ROW", "COL", "SQUARE", "POW2", "LIMIT", "LIMIT_EXP", "LIMIT_BITS")
            return dict.fromkeys(names, False)
        limit = parse_format(self.spec.format).max
        mantissa, exponent = math.frexp(limit)
        return {
            "ROW": self.row is not None,
            "COL": self.col is not None,
            "SQUARE": self.spec.block == (TILE, TILE),
            "POW2": self.spec.scale == "pow2",
            "LIMIT": limit,
            "LIMIT_EXP": exponent - 1,
            "LIMIT_BITS": int((2 * mantissa - 1) * (1 << 23)),
        }


def supported(row: QSpec | None, col: QSpec | None) -> bool:
    """Whether `emit_tile` makes these copies (of a source whose sides divide by 128)."""
    specs = [spec for spec in (row, col) if spec is not None]
    return bool(specs) and all(spec == specs[0] and spec.block_scaled for spec in specs)


def _empty(rows: int, contraction: int, spec: QSpec, device: torch.device) -> QTensor:
    data = torch.empty(rows, contraction, dtype=DTYPES[spec.format], device=device)
    blocks = contraction // TILE
    if spec.block == (TILE, TILE):
        padded = -(-blocks // K_BLOCK_PAD) * K_BLOCK_PAD
        # The padding is read by the GEMM but multiplies nothing; it must only not be NaN.
        scale = torch.zeros(rows // TILE, padded, dtype=torch.float32, device=device)[:, :blocks]
        return QTensor(data, scale, (TILE, TILE), 1, spec)
    scale = torch.empty(blocks, rows, dtype=torch.float32, device=device).T
    return QTensor(data, scale, (1, TILE), 1, spec)


def _pointers(copy: QTensor | None, unused: Tensor) -> tuple[object, ...]:
    if copy is None:
        return unused, unused, 0, 0
    pitch = copy.scale.stride(0) if copy.tile[0] == TILE else copy.scale.stride(1)
    return copy.data, copy.scale, copy.data.shape[1], pitch
