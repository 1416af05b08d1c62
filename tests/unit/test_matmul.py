"""The reference GEMM against float64, against the blockwise definition, and against TransformerEngine's linear
layer.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from infir2_core.model.linear import Linear, Operands
from infir2_core.ops.reference import matmul as reference
from infir2_core.ops.reference.matmul import blockwise_truth, matmul
from infir2_core.ops.reference.quantize import QTensor, QuantPlan, quantize
from infir2_core.precision.spec import QSpec

U = 2.0**-24  # unit roundoff of float32


def operand(rows: int, depth: int, block: tuple[int, int], scale: str, seed: int, axis: int = 1) -> QTensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, depth) if axis == 1 else (depth, rows)
    x = (torch.randn(shape, generator=generator) * torch.exp2(3 * torch.randn(shape, generator=generator))).bfloat16()
    spec = QSpec(format="e4m3", block=block, scale=scale)
    made = quantize(x, QuantPlan(row=spec) if axis == 1 else QuantPlan(col=spec))
    result = made.row if axis == 1 else made.col
    assert result is not None
    return result


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("m,n,k", [(16, 24, 128), (33, 7, 300), (5, 130, 1), (64, 64, 1000)])
@pytest.mark.parametrize("axis", [0, 1])
def test_gemm_is_within_the_accumulation_bound(
    scale: str, m: int, n: int, k: int, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound: K products and K - 1 additions in float32 err by at most (K + 1) u sum|ab| in any order, to first order;
    each operand that is not exact after code x scale adds u |ab|. Doubling covers the second-order terms."""
    a, b = operand(m, k, (1, 128), scale, 1, axis), operand(n, k, (128, 128), scale, 2)
    exact = [q.codes.double() * _grid(q) for q in (a, b)]
    truth, magnitude = exact[0] @ exact[1].T, exact[0].abs() @ exact[1].abs().T
    bound = 2 * (k + 3) * U * magnitude
    assert ((matmul(a, b, torch.float32).double() - truth).abs() <= bound).all()
    for native in (True, False):  # a CPU that multiplies bf16 itself, and one that goes through float32
        monkeypatch.setattr(reference, "cpu_multiplies_bf16", lambda native=native: native)
        rounded = matmul(a, b, torch.bfloat16)
        assert rounded.dtype == torch.bfloat16
        assert ((rounded.double() - truth).abs() <= bound + 2.0**-8 * truth.abs()).all()


def test_bf16_is_not_much_slower_than_the_faster_of_two_ways() -> None:
    """On a CPU without AVX-512 torch's own bf16 GEMM takes 60 times as long as a float32 one, but for a few rows."""
    x, w = torch.randn(1024, 256), torch.randn(768, 256)
    wide = torch.randn(4096, 1024).bfloat16()

    def seconds(call: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(7):
            began = time.process_time()
            call()
            best = min(best, time.process_time() - began)
        return best

    for a, b in ((x, w), (w, x), (x.T, torch.randn(768, 1024))):
        narrow = a.bfloat16(), b.bfloat16()
        own = seconds(lambda narrow=narrow: matmul(*narrow, torch.bfloat16))
        assert own < 4 * seconds(lambda a=a, b=b: a @ b.T) + 3e-3
    row = wide[:1].clone()
    assert seconds(lambda: matmul(row, wide, torch.bfloat16)) < 4 * seconds(lambda: row @ wide.T) + 1e-3


def _grid(q: QTensor) -> torch.Tensor:
    height, width = q.tile if q.axis == 1 else q.tile[::-1]
    rows, depth = q.codes.shape
    return q.scale_inv.double().repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :depth]


def test_dequantise_then_multiply_agrees_with_the_blockwise_definition() -> None:
    a, b = operand(48, 512, (1, 128), "fp32", 3), operand(40, 512, (128, 128), "fp32", 4)
    truth = blockwise_truth(a, b, 128)
    magnitude = a.dequantize().abs() @ b.dequantize().abs().T
    assert ((matmul(a, b, torch.float32) - truth).abs() <= 4 * (512 + 3) * U * magnitude).all()


def test_linear_layer_equals_transformer_engine() -> None:
    """te.Linear under Float8BlockScaling, forward and both gradients, from the golden vectors. Both round to bf16
    once. Hopper's FP8 tensor cores keep about 14 bits inside a block of 128, so sums differ by some 2**-13 of their
    size: a bf16 rounding (2**-8) flips in a few per cent of the elements, by one ulp."""
    data = np.load(Path(__file__).parents[1] / "data" / "te_blockwise.npz")
    x, w, g, y, dx, dw = (
        torch.from_numpy(data[f"te_linear/{k}_bf16"].copy()).view(torch.bfloat16)
        for k in ("x", "w", "g", "y", "dx", "dw")
    )
    tile, square = (QSpec(format="e4m3", block=b, scale="pow2") for b in ((1, 128), (128, 128)))
    layer = Linear(384, 512, False, Operands(tile, square, tile, square, tile, tile), torch.bfloat16)
    layer.weight.data.copy_(w)
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(g)
    assert x.grad is not None and layer.weight.grad is not None
    for ours, theirs in ((out, y), (x.grad, dx), (layer.weight.grad.bfloat16(), dw)):
        assert ours.shape == theirs.shape
        different = ours != theirs
        assert different.float().mean() < 0.10
        scale = theirs.float().abs().amax()
        assert ((ours.float() - theirs.float()).abs() <= 2.0**-7 * theirs.float().abs() + 2.0**-12 * scale).all()
