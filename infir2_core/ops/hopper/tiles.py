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
        # Adding what a mantissa of LIMIT_BITS lacks carries into the exponent exactly when the mantissa is larger.
        above = (amax.to(tl.int32, bitcast=True) + (0x7FFFFF - LIMIT_BITS)) & 0x7F800000
        bits = tl.where(plain, 127 << 23, (254 << 23) + tl.minimum((LIMIT_EXP << 23) - above, 0))
        encode = bits.to(tl.float32, bitcast=True)
        # 2**-127 has no exponent field of its own: it is the subnormal with the highest mantissa bit
        decode = tl.where(bits < 254 << 23, (254 << 23) - bits, 0x00400000).to(tl.float32, bitcast=True)
    else:
        encode = tl.minimum(tl.math.div_rn(LIMIT, tl.where(plain, LIMIT, amax)), 3.3895313892515355e38)
        decode = tl.math.div_rn(1.0, encode)
    return encode, decode


@triton.jit
def to_codes(scaled, dtype: tl.constexpr):
    """Round-to-nearest-even codes; the hardware's conversion saturates, infinities too, and a NaN stays one."""
    return scaled.to(dtype)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _without_nan(y):
    """float32 |y|, 0 for NaN, which takes no part in an amax."""
    value = tl.abs(y.to(tl.float32))
    return tl.where(value == value, value, 0.0)


@triton.jit
def _count(y):
    """Infinities and NaNs of a tile."""
    value = tl.abs(y.to(tl.float32))
    return tl.sum(tl.sum(((value != value) | (value == float("inf"))).to(tl.int64), 1), 0)


@triton.jit
def row_amax(y, counter, COUNT: tl.constexpr):
    """float32 amax of each row of a bfloat16 tile; with COUNT its infinities and NaNs are added to `counter`.

    One instruction an element: a maximum that lets NaN through also tells whether anything was not finite, and only
    then the tile is looked at again.
    """
    amax = tl.reduce(tl.abs(y.to(tl.float32)), 1, _larger)
    if tl.sum((amax < float("inf")).to(tl.int32), 0) < y.shape[0]:
        amax = tl.max(_without_nan(y), 1)
        if COUNT:
            tl.atomic_add(counter, _count(y))
    return amax


@triton.jit
def emit_rows(
    y,
    r,
    c0,
    codes,
    scale,
    width,
    pitch,
    counter,
    COUNT: tl.constexpr,
    POW2: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_EXP: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
):
    """Row copy of the strip y (bfloat16 [rows, 128]) at rows r and columns c0 ... of the source.

    `width` is the contraction length, `pitch` the distance of scales that are neighbours along the contraction.
    """
    encode, decode = encode_scale(row_amax(y, counter, COUNT), LIMIT, LIMIT_EXP, LIMIT_BITS, POW2)
    at = codes + r.to(tl.int64)[:, None] * width + c0 + tl.arange(0, 128)[None, :]
    tl.store(at, to_codes(y.to(tl.float32) * encode[:, None], codes.dtype.element_ty))
    tl.store(scale + (c0 // 128).to(tl.int64) * pitch + r, decode)


@triton.jit
def _byte(y, encode, dtype: tl.constexpr):
    return to_codes(y.to(tl.float32) * encode[None, :], dtype).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def emit_cols(
    y0,
    y1,
    y2,
    y3,
    r0,
    c,
    codes,
    scale,
    width,
    pitch,
    counter,
    COUNT: tl.constexpr,
    POW2: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_EXP: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
):
    """Column copy of a strip at rows r0 ... r0 + 127 and columns c, as `emit_rows`.

    y0 to y3 (bfloat16 [32, columns]) hold every fourth row, beginning with rows 0, 1, 2 and 3: the codes of four rows
    are packed into a word before the strip is transposed, because single bytes would make that four times as long.
    """
    a0, a1, a2, a3 = (
        tl.abs(y0.to(tl.float32)),
        tl.abs(y1.to(tl.float32)),
        tl.abs(y2.to(tl.float32)),
        tl.abs(y3.to(tl.float32)),
    )
    amax = tl.reduce(_larger(_larger(a0, a1), _larger(a2, a3)), 0, _larger)
    if tl.sum((amax < float("inf")).to(tl.int32), 0) < y0.shape[1]:
        amax = tl.max(
            tl.maximum(tl.maximum(_without_nan(y0), _without_nan(y1)), tl.maximum(_without_nan(y2), _without_nan(y3))),
            0,
        )
        if COUNT:
            tl.atomic_add(counter, _count(y0) + _count(y1) + _count(y2) + _count(y3))
    encode, decode = encode_scale(amax, LIMIT, LIMIT_EXP, LIMIT_BITS, POW2)
    dtype: tl.constexpr = codes.dtype.element_ty
    low = _byte(y0, encode, dtype) | (_byte(y1, encode, dtype) << 8)
    packed = low | (_byte(y2, encode, dtype) << 16) | (_byte(y3, encode, dtype) << 24)
    words = codes.to(tl.pointer_type(tl.int32))
    at = words + (c.to(tl.int64)[:, None] * width + r0) // 4 + tl.arange(0, 32)[None, :]
    tl.store(at, tl.trans(packed))
    tl.store(scale + (r0 // 128).to(tl.int64) * pitch + c, decode)


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
