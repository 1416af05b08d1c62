"""What every quantising kernel ends with: strips of one 128 x 128 tile of bf16 values become codes and scales.

A tile holds whole blocks in both directions, so one read of it yields the row copy (1x128 blocks along the columns)
and the column copy (1x128 blocks along the rows, stored transposed because Hopper's FP8 GEMM wants the contraction
axis contiguous). A program does not hold the tile in registers, which would leave room for no other program on the
multiprocessor: it goes through it in strips, of rows for the row copy and of columns for the column copy. The second
visit finds the tile in the cache. The arithmetic is that of ops/reference/codes.py, bit for bit.
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
STRIP = 32  # rows or columns of a tile that a program holds at a time
WARPS = 8
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
def magnitude_bits(y):
    """Bit patterns of |y| for a bfloat16 tensor: as integers they order as the numbers do, NaN above infinity."""
    return (y.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)


@triton.jit
def amax_of(y, axis: tl.constexpr):
    """float32 amax of a bfloat16 tile along an axis; NaN takes no part."""
    bits = magnitude_bits(y)
    return (tl.max(tl.where(bits > 0x7F80, 0, bits), axis) << 16).to(tl.float32, bitcast=True)


@triton.jit
def count_nonfinite(y, counter):
    """Adds the infinities and NaNs of a tile to an int64 scalar."""
    bad = tl.sum(tl.sum((magnitude_bits(y) >= 0x7F80).to(tl.int32), 1), 0)
    if bad > 0:
        tl.atomic_add(counter, bad.to(tl.int64))


@triton.jit
def emit_rows(
    y,
    r,
    c,
    codes,
    scale,
    width,
    pitch,
    POW2: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_EXP: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
):
    """Row copy of the strip y (bfloat16 [rows, 128]) at rows r and columns c of the source.

    `width` is the contraction length, `pitch` the distance of scales that are neighbours along the contraction.
    """
    encode, decode = encode_scale(amax_of(y, 1), LIMIT, LIMIT_EXP, LIMIT_BITS, POW2)
    at = codes + r.to(tl.int64)[:, None] * width + c[None, :]
    tl.store(at, to_codes(y.to(tl.float32) * encode[:, None], LIMIT, codes.dtype.element_ty))
    tl.store(scale + (tl.min(c, 0) // 128).to(tl.int64) * pitch + r, decode)


@triton.jit
def emit_cols(
    y,
    r,
    c,
    codes,
    scale,
    width,
    pitch,
    POW2: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_EXP: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
):
    """Column copy of the strip y (bfloat16 [128, columns]) at rows r and columns c, as `emit_rows`."""
    encode, decode = encode_scale(amax_of(y, 0), LIMIT, LIMIT_EXP, LIMIT_BITS, POW2)
    at = codes + c.to(tl.int64)[:, None] * width + r[None, :]
    tl.store(at, tl.trans(to_codes(y.to(tl.float32) * encode[None, :], LIMIT, codes.dtype.element_ty)))
    tl.store(scale + (tl.min(r, 0) // 128).to(tl.int64) * pitch + c, decode)


@dataclass(frozen=True)
class Copies:
    """Buffers for the copies of a [R, C] source, and the arguments that the kernels take for them."""

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
        """row_codes, row_scale, row_width, row_pitch, col_codes, col_scale, col_width, col_pitch."""
        return (*_pointers(self.row, self.nonfinite), *_pointers(self.col, self.nonfinite))

    def constants(self) -> dict[str, object]:
        """The compile-time arguments of the kernels."""
        if self.spec is None:
            names = ("ROW", "COL", "POW2", "LIMIT", "LIMIT_EXP", "LIMIT_BITS")
            return dict.fromkeys(names, False)
        limit = parse_format(self.spec.format).max
        mantissa, exponent = math.frexp(limit)
        return {
            "ROW": self.row is not None,
            "COL": self.col is not None,
            "POW2": self.spec.scale == "pow2",
            "LIMIT": limit,
            "LIMIT_EXP": exponent - 1,
            "LIMIT_BITS": int((2 * mantissa - 1) * (1 << 23)),
        }


def supported(row: QSpec | None, col: QSpec | None) -> bool:
    """Whether the kernels make these copies (of a source whose sides divide by 128)."""
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
