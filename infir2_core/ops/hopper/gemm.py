"""Block-scaled FP8 GEMM by cuBLASLt through torch (reference: ops/reference/matmul.py).

Both operands have their contraction axis contiguous. Float32 partial sums of 128 products are multiplied by both scales
and added in float32. Padding of 128x128 scales to four along the contraction is what older stacks missed: without it,
K / 128 not divisible by four gave silently wrong numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference.quantize import QTensor
from .tiles import K_BLOCK_PAD, TILE

try:
    from torch.nn.functional import ScalingType
except ImportError:  # an older torch: nothing here is supported then
    ScalingType = None  # type: ignore[assignment, misc]


def supports(a: QTensor, b: QTensor) -> bool:
    """Whether `scaled_matmul` takes these operands: a 1x128, b 1x128 or 128x128, laid out by ops/hopper/tiles.py."""
    if ScalingType is None or not (_laid_out(a) and _laid_out(b)) or a.tile != (1, TILE):
        return False
    if a.spec.format == b.spec.format == "e5m2":
        return False
    return all(side % 16 == 0 for side in (*a.data.shape, *b.data.shape))


def scaled_matmul(a: QTensor, b: QTensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a . b^T (+ bias); a [M, K], b [N, K], `supports(a, b)`.

    Args:
        a: left operand.
        b: right operand.
        out_dtype: bfloat16 or float32.
        bias: bfloat16 [N].
    """
    fused = bias if out_dtype == torch.bfloat16 else None
    out = F.scaled_mm(
        a.data, b.data.T, a.scale, _kind(a), _right_scale(b), _kind(b), bias=fused, output_dtype=out_dtype
    )
    return out if bias is None or fused is not None else out + bias


def _laid_out(q: QTensor) -> bool:
    if q.axis != 1 or not q.data.is_contiguous() or q.tile not in ((1, TILE), (TILE, TILE)):
        return False
    rows, contraction = q.data.shape
    if contraction % TILE:
        return False
    if q.tile == (1, TILE):
        return q.scale.stride() == (1, rows)
    return q.scale.stride() == (_padded(contraction), 1)


def _padded(contraction: int) -> int:
    return -(-(contraction // TILE) // K_BLOCK_PAD) * K_BLOCK_PAD


def _right_scale(q: QTensor) -> Tensor:
    if q.tile == (1, TILE):
        return q.scale
    pitch = _padded(q.data.shape[1])
    return q.scale.as_strided((pitch, q.scale.shape[0]), (1, pitch))


def _kind(q: QTensor) -> ScalingType:
    return ScalingType.BlockWise1x128 if q.tile == (1, TILE) else ScalingType.BlockWise128x128
