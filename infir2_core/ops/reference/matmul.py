"""C = A . B^T for operands that are quantised or not: dequantise, then one ordinary GEMM with float32 accumulation.

Truth for a block-scaled GEMM is the float32 sum over blocks of (float32 sum of code products) x scale x scale
(`blockwise_truth`). Multiplying dequantised operands rounds at other places: within K / 2**23 times the sum of absolute
products, plus one rounding of each operand where code x scale is not exact (tests/unit/test_matmul.py derives the
bound).

Power-of-two scales make code x scale exact in bfloat16 (4 significant bits), so that such operands use the machine's
bfloat16 GEMM where it has one; other scales need float32. A CPU without AVX-512 has none: but for a few rows torch's
takes up to 60 times as long there as a float32 GEMM, which makes the same products and sums.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .quantize import QTensor

Operand = QTensor | Tensor
SHORT = 8  # rows; from 16 on float32 is faster with any shape that was tried


def matmul(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    """A . B^T, accumulated in float32 and rounded once to `out_dtype`.

    Args:
        a: [M, K], a QTensor or a bfloat16 / float32 tensor.
        b: [N, K] likewise.
        out_dtype: bfloat16 or float32.

    Returns:
        [M, N].
    """
    exact = all(_fits_bf16(operand) for operand in (a, b))
    cpu = a.data.device.type == "cpu"
    native = not cpu or (out_dtype == torch.bfloat16 and (cpu_multiplies_bf16() or _is_short(a, b)))
    work = torch.bfloat16 if exact and native else torch.float32
    left, right = _values(a, work), _values(b, work).T
    if work == out_dtype:
        return torch.mm(left, right)
    if work == torch.bfloat16:  # a GPU GEMM that writes its float32 accumulators
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).to(out_dtype)


def _is_short(a: Operand, b: Operand) -> bool:
    """Whether converting a weight would take longer than multiplying a few tokens by it, as generation does."""
    along = b.axis == 1 if isinstance(b, QTensor) else b.is_contiguous()  # the other layout is slow for any rows
    return along and len(a.codes if isinstance(a, QTensor) else a) <= SHORT


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU's bfloat16 GEMM is worth using."""
    return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


def blockwise_truth(a: QTensor, b: QTensor, block: int) -> Tensor:
    """The definition: float32 partial sums over `block` codes of the contraction, each times both scales, added in
    float32.

    Slow; for tests. Both operands need blocks of `block` along the contraction.

    Returns:
        float32 [M, N].
    """
    codes_a, codes_b = (_expand(q, block) for q in (a, b))
    total = torch.zeros(a.codes.shape[0], b.codes.shape[0])
    for start in range(0, a.codes.shape[1], block):
        partial = codes_a[0][:, start : start + block] @ codes_b[0][:, start : start + block].T
        i = start // block
        total += partial * codes_a[1][:, i, None] * codes_b[1][None, :, i]
    return total


def _expand(q: QTensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes as float32 values [rows, K] and decode scales [rows, K blocks]."""
    codes, scale = q.codes.float(), q.scale_inv
    height, width = q.tile if q.axis == 1 else q.tile[::-1]
    if width != block:
        raise ValueError(f"blocks of {width} along the contraction, expected {block}")
    return codes, scale.repeat_interleave(height, 0)[: codes.shape[0]]


def _fits_bf16(operand: Operand) -> bool:
    return operand.exact_in_bf16 if isinstance(operand, QTensor) else operand.dtype == torch.bfloat16


def _values(operand: Operand, dtype: torch.dtype) -> Tensor:
    return operand.dequantize(dtype) if isinstance(operand, QTensor) else operand.to(dtype)
