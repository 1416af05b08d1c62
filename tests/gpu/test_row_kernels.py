"""Kernels that hold a row or stay for many tiles, at the sizes of training, against float64 and the reference."""

from __future__ import annotations

import fresh
import pytest
import torch
from hopper_machine import normal, poisoned_buffers  # noqa: F401

from infir2_core.ops.reference import elementwise as plainly
from infir2_core.ops.reference.loss import softmax_gradient_
from infir2_core.precision.spec import QSpec, QuantPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


@pytest.mark.parametrize(
    "rows,width",
    [(16384, 1536), (8191, 3584), (4097, 896), (1000, 5128), (133, 8192), (131, 16384), (7, 28672), (3000, 8), (1, 64)],
)
@pytest.mark.parametrize("add", [True, False])
def test_norm_backward_at_every_size(rows: int, width: int, add: bool) -> None:
    """dx within two bf16 roundings of float64, the weight's gradient within the bound of any order of additions, both
    the same in every run; a row with a NaN spoils itself and the columns' sums.
    """
    from infir2_core.ops.hopper import elementwise

    x, grad, beside = normal(rows, width, 1), normal(rows, width, 2), normal(rows, width, 3)
    weight, residual = 1 + normal(1, width, 4)[0].float() / 3, beside if add else None
    rstd = plainly.add_rstd(x, None, 1e-6)[1]
    out, total = elementwise.norm_backward(grad, x, rstd, weight, residual)
    g, normed = grad.double(), x.double() * rstd.double()[:, None]
    exact, terms = (g * normed).sum(0), (g * normed).abs().sum(0)
    assert ((total.double() - exact).abs() <= (rows + 3) * 2.0**-24 * terms).all()
    g *= weight.bfloat16().double()
    exact_x = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd.double()[:, None]
    bound = 2.0**-8 * exact_x.abs() + 1e-5 * (1 + rstd.double()[:, None])
    if add:
        exact_x = exact_x + beside.double()
        bound += 2.0**-8 * (exact_x.abs() + bound)
    assert ((out.double() - exact_x).abs() <= bound).all()
    for _ in range(3):
        again = elementwise.norm_backward(grad, x, rstd, weight, residual)
        assert torch.equal(again[0], out) and torch.equal(again[1], total)
    x[rows // 2, width // 3] = float("nan")
    spoilt, sums = elementwise.norm_backward(grad, x, rstd, weight, residual)
    rest = torch.arange(rows, device="cuda") != rows // 2
    assert spoilt[rows // 2].isnan().all() and torch.equal(spoilt[rest], out[rest])
    assert sums.isnan().nonzero().flatten().tolist() == [width // 3]


@pytest.mark.parametrize(
    "tokens,vocab", [(700, 151936), (260, 152064), (131, 50257), (1, 151936), (40, 262144), (9, 260)]
)
def test_softmax_gradient_at_every_size(tokens: int, vocab: int) -> None:
    from infir2_core.ops.hopper import loss

    logits = 3 * normal(tokens, vocab, 5)
    targets = torch.randint(0, vocab, (tokens,), generator=fresh.generator(6, "cuda"), device="cuda")
    weights = torch.rand(tokens, generator=fresh.generator(7, "cuda"), device="cuda")
    targets[tokens // 2], targets[tokens // 3] = 0, vocab - 1
    if tokens > 20:
        logits[11, 5], logits[12, : vocab // 2], logits[13, 4] = float("nan"), float("-inf"), float("inf")
    copy, third = logits.clone(), logits.clone()
    expected = softmax_gradient_(copy, targets, weights)
    made = loss.softmax_gradient_(logits, targets, weights)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=2e-5, equal_nan=True)
    different = (logits != copy) & ~(logits.isnan() & copy.isnan())
    assert different.float().mean() <= 1e-2  # exp differs in its last bits; a few values stand near a border
    torch.testing.assert_close(logits.float(), copy.float(), rtol=2.0**-7, atol=1e-9, equal_nan=True)
    assert torch.equal(loss.softmax_gradient_(third, targets, weights).nan_to_num(), made.nan_to_num())
    assert torch.equal(third.view(torch.int16), logits.view(torch.int16))


TILE = QSpec(format="e4m3", block=(1, 128), scale="pow2")
SQUARE = QSpec(format="e4m3", block=(128, 128), scale="pow2")


@pytest.mark.parametrize("rows,width", [(16384, 1536), (8192, 3584), (128, 128), (384, 8960)])
@pytest.mark.parametrize("col", [TILE, SQUARE], ids=["tiles", "squares"])
def test_every_tuning_of_the_norm_with_both_copies_gives_the_same_codes(
    rows: int, width: int, col: QSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infir2_core.ops.hopper import quantize

    x, weight, plan = normal(rows, width, 8), 1 + normal(1, width, 9)[0].float() / 3, QuantPlan(row=TILE, col=col)
    x[rows // 2, 3], x[0, 0] = float("nan"), float("inf")
    rstd = torch.rand(rows, generator=fresh.generator(10, "cuda"), device="cuda") + 0.5
    counter = torch.zeros((), dtype=torch.int64, device="cuda")

    def both() -> list[torch.Tensor]:
        counter.zero_()
        made = [quantize.quantize(x, plan, counter), quantize.norm_quantize(x, rstd, weight, plan, counter)]
        copies = [copy for pair in made for copy in (pair.row, pair.col) if copy is not None]
        return [t.contiguous() for q in copies for t in (q.codes.view(torch.uint8), q.scale_inv)] + [counter.clone()]

    expected, sources = both(), (quantize.LOADED, quantize.NORMED)
    for tuning in ((4, 512, 3), (8, 256, 4), (2, 512, 2)):
        monkeypatch.setattr(quantize, "TUNING", quantize.TUNING | dict.fromkeys(sources, tuning))
        for ours, theirs in zip(both(), expected, strict=True):
            assert torch.equal(ours, theirs), tuning
    assert int(expected[-1]) == 4
