"""Buffers of quantised copies in the layouts that Hopper's FP8 GEMM reads.

The contraction axis of both copies is contiguous, so that the column copy is stored transposed. Scales of 1x128 blocks
lie with the rows contiguous; those of 128x128 blocks with the contraction contiguous, padded to four.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...precision.spec import QSpec
from ..reference.codes import DTYPES
from ..reference.quantize import QTensor
from .cuda import Argument

TILE = 128
K_BLOCK_PAD = 4  # cuBLASLt reads 128x128 scales in groups of four along the contraction


@dataclass(frozen=True)
class Copies:
    """Uninitialised copies of a [R, C] source; the kernel that gets them writes every element."""

    row: QTensor | None
    col: QTensor | None

    @staticmethod
    def allocate(shape: tuple[int, int], row: QSpec | None, col: QSpec | None, device: torch.device) -> Copies:
        """Buffers for the wanted copies."""
        rows, cols = shape
        return Copies(
            _empty(rows, cols, row, device) if row else None, _empty(cols, rows, col, device) if col else None
        )


def arguments(copy: QTensor | None) -> tuple[Argument, ...]:
    """The fields of the kernels' `struct Copy`: codes, scale, contraction length, distance of neighbouring scales
    along the contraction (1x128) or across it (128x128).
    """
    if copy is None:
        return None, None, 0, 0
    pitch = copy.scale.stride(0) if copy.tile[0] == TILE else copy.scale.stride(1)
    return copy.data, copy.scale, copy.data.shape[1], pitch


def defines(row: QTensor | None, col: QTensor | None, other: QTensor | None = None) -> dict[str, int]:
    """The constants by which a kernel knows which copies it makes, in which format and scale rule."""
    spec = next((copy.spec for copy in (row, col, other) if copy is not None), None)
    return {
        "ROW": int(row is not None),
        "COL": int(col is not None),
        "POW2": int(spec is None or spec.scale == "pow2"),
        "E5M2": int(spec is not None and spec.format == "e5m2"),
    }


def supported(row: QSpec | None, col: QSpec | None) -> bool:
    """Whether the kernels make these copies (of a source whose sides divide by 128): of one format and scale rule, in
    blocks of one shape, or the row copy in 1x128 and the column copy in 128x128.
    """
    specs = [spec for spec in (row, col) if spec is not None]
    if not specs or not all(spec.block_scaled for spec in specs) or len({(s.format, s.scale) for s in specs}) > 1:
        return False
    return specs[0].block in ((1, TILE), specs[-1].block)


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
