"""The own wgrad GEMM (ops/hopper/wgrad.py) on a Hopper GPU: against float64, itself and cuBLASLt."""

from __future__ import annotations

import random

import fresh
import pytest
import torch

from infir2_core.ops.dispatch import quantize
from infir2_core.ops.hopper import gemm, wgrad
from infir2_core.ops.hopper.cuda import MULTIPROCESSORS
from infir2_core.ops.reference.quantize import QTensor
from infir2_core.precision.spec import QSpec, QuantPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


def operand(rows: int, contraction: int, number: int, form: str = "e4m3", scale: str = "pow2") -> QTensor:
    """Rows of any number: made of the next multiple of 128 and cut."""
    generator = fresh.generator(number, "cuda")
    x = torch.randn(-(-rows // 128) * 128, contraction, generator=generator, device="cuda")
    x *= torch.exp2(2 * torch.randn(len(x), contraction // 128, generator=generator, device="cuda")).repeat_interleave(
        128, 1
    )
    q = quantize(x.bfloat16(), QuantPlan(row=QSpec(format=form, block=(1, 128), scale=scale))).row
    assert q is not None
    q.data, q.scale = q.data[:rows].contiguous(), q.scale[:rows].T.contiguous().T
    return q


def close(made: torch.Tensor, a: QTensor, b: QTensor) -> None:
    """Within the bound of test_hopper_gemm.py, one rounding a K block more for tiles that are shared out."""
    exact = [q.dequantize(torch.float64) for q in (a, b)]
    truth, magnitude = exact[0] @ exact[1].T, exact[0].abs() @ exact[1].abs().T
    bound = (2.0**-11 + a.data.shape[1] / 128 * 2.0**-23) * magnitude
    assert ((made.double() - truth).abs() <= bound).all()


# One tile shared by all, fewer tiles than multiprocessors, whole waves and a rest, exactly a wave, K of one block.
SHAPES = [
    (128, 192, 65536), (1536, 1536, 16384), (2048, 1536, 8192), (1536, 8960, 1024), (2816, 1152, 640), (128, 128, 128),
]  # fmt: skip


@pytest.mark.parametrize("m,n,k", SHAPES)
def test_shared_tiles_add_up_to_the_same_bits_every_time(m: int, n: int, k: int) -> None:
    a, b = operand(m, k, 1), operand(n, k, 2)
    torch.full((m, n), torch.nan, device="cuda")  # what the next buffer of this size holds
    made = wgrad.matmul_tiles(a, b)
    close(made, a, b)
    assert all(torch.equal(made, wgrad.matmul_tiles(a, b)) for _ in range(10))
    before = torch.randn(m, n, device="cuda")
    total = before.clone()
    assert wgrad.matmul_tiles(a, b, total) is total and torch.equal(total, before + made)


def test_shapes_at_random() -> None:
    """Sides divisible by 16 and by nothing else, so that tiles reach over the edges."""
    chance = random.Random(fresh.SEED)
    for number in range(12):
        m, n, k = 16 * chance.randint(1, 200), 16 * chance.randint(1, 200), 128 * chance.randint(1, 40)
        a, b = operand(m, k, 2 * number), operand(n, k, 2 * number + 1, scale=chance.choice(["pow2", "fp32"]))
        before = torch.randn(m + 1, n, device="cuda")  # a row behind the result, which nobody may touch
        space = before.clone()
        space[:m] = torch.nan
        a_out = wgrad.matmul_tiles(a, b, space[:m].zero_())
        close(a_out, a, b)
        assert torch.equal(space[m], before[m]), (m, n, k)


@pytest.mark.parametrize("formats", [("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_gradients_in_e5m2(formats: tuple[str, str]) -> None:
    a, b = operand(512, 2048, 1, formats[0]), operand(640, 2048, 2, formats[1])
    assert gemm.OWN in gemm.choices(a, b, torch.float32)
    close(wgrad.matmul_tiles(a, b), a, b)


def test_whole_tiles_have_the_bits_of_cublaslt() -> None:
    """Exactly one wave of tiles: none is shared out, and sums follow the same order."""
    m, n = wgrad.ROWS * (MULTIPROCESSORS // 4), wgrad.COLS * 4
    a, b = operand(m, 4096, 1), operand(n, 4096, 2)
    assert torch.equal(wgrad.matmul_tiles(a, b), gemm.scaled_matmul(a, b, torch.float32, by=gemm.CUBLASLT))


def test_streams_do_not_disturb_each_other() -> None:
    """Each has a place of its own where parts of tiles are handed over."""
    pairs = [(operand(640, 16384, i), operand(768, 16384, 10 + i)) for i in range(3)]
    alone = [wgrad.matmul_tiles(*pair) for pair in pairs]
    streams, made = [torch.cuda.Stream() for _ in pairs], []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, pair in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                made.append(wgrad.matmul_tiles(*pair))
    torch.cuda.synchronize()
    assert all(torch.equal(one, alone[i % 3]) for i, one in enumerate(made))
