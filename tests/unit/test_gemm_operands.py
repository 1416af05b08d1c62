"""How operands are handed to the library's block-scaled GEMM: its layout rules, checked by a stand-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infir2_core.ops.hopper import gemm
from infir2_core.ops.hopper.copies import Copies
from infir2_core.ops.reference.matmul import matmul
from infir2_core.ops.reference.quantize import QTensor, quantize
from infir2_core.precision.spec import QSpec, QuantPlan

pytestmark = pytest.mark.skipif(gemm.ScalingType is None, reason="this torch has no scaled_mm")
TILE, SQUARE = (QSpec(format="e4m3", block=block, scale="pow2") for block in ((1, 128), (128, 128)))


def operand(rows: int, contraction: int, spec: QSpec, seed: int) -> QTensor:
    """Quantised by reference and laid out as the kernels lay it, what pads the scales filled with a large number."""
    x = torch.randn(rows, contraction, generator=torch.Generator().manual_seed(seed))
    x = x * torch.exp2(4 * torch.randn(rows, 1, generator=torch.Generator().manual_seed(seed + 1)))
    made, laid = (
        quantize(x.bfloat16(), QuantPlan(row=spec)).row,
        Copies.allocate((rows, contraction), spec, None, x.device).row,
    )
    assert made is not None and laid is not None
    if spec.block == (128, 128):
        pitch = laid.scale.stride(0)
        laid.scale.as_strided((laid.scale.shape[0], pitch), (pitch, 1)).fill_(1e30)
    laid.data.copy_(made.data)
    laid.scale.copy_(made.scale)
    return laid


def library(a: torch.Tensor, b: torch.Tensor, *scales: Any, output_dtype: torch.dtype) -> Any:
    """What torch documents of F.scaled_mm for these scalings: shapes and strides of scales, then the product."""

    def values(codes: torch.Tensor, scale: torch.Tensor, kind: Any) -> torch.Tensor:
        rows, contraction = codes.shape
        blocks = contraction // 128
        if kind == gemm.ScalingType.BlockWise1x128:
            assert scale.shape == (rows, blocks) and scale.stride() == (1, rows)
        else:
            padded = -(-blocks // 4) * 4
            assert scale.shape == (padded, rows // 128) and scale.stride() == (1, padded)
            scale = scale.T[:, :blocks].repeat_interleave(128, 0)
        return codes.float() * scale.repeat_interleave(128, 1)

    kinds = scales[1::2]
    assert gemm.ScalingType.BlockWise1x128 in kinds
    return (values(a, *scales[:2]) @ values(b.T, *scales[2:]).T).to(output_dtype)


@pytest.mark.parametrize("left,right", [(TILE, TILE), (TILE, SQUARE), (SQUARE, TILE)])
@pytest.mark.parametrize("blocks", [1, 4, 5])
def test_either_operand_may_be_in_square_blocks(
    left: QSpec, right: QSpec, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = operand(256, 128 * blocks, left, 1), operand(384, 128 * blocks, right, 2)
    assert gemm.supports(a, b)
    assert gemm.choose(a, b, torch.float32) == gemm.CUBLASLT or left == TILE
    monkeypatch.setattr(gemm.F, "scaled_mm", library)
    made = gemm.scaled_matmul(a, b, torch.float32, by=gemm.CUBLASLT)
    torch.testing.assert_close(made, matmul(a, b, torch.float32), rtol=1e-5, atol=1e-3)


def test_two_operands_in_square_blocks_are_left_to_the_reference() -> None:
    assert not gemm.supports(operand(128, 256, SQUARE, 1), operand(128, 256, SQUARE, 2))
