"""Kernels that read whole rows against the reference: norm's backward, rotary embedding, loss; on a GPU or the CPU."""

from __future__ import annotations

import fresh
import pytest
import torch
from hopper_machine import DEVICE, normal, on_this_machine, poisoned_buffers  # noqa: F401

from infir2_core.ops.hopper import elementwise, rope_heads
from infir2_core.ops.hopper import loss as hopper_loss
from infir2_core.ops.reference import elementwise as plainly
from infir2_core.ops.reference.elementwise import rope_tables
from infir2_core.ops.reference.loss import softmax_gradient_


@pytest.mark.parametrize("rows,width", [(300, 256), (77, 640), (5, 8), (41, 1544), (3, 4104)])
@pytest.mark.parametrize("add", [True, False])
def test_norm_backward(rows: int, width: int, add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with many rows a team, with few, with fewer than teams; widths that leave lanes idle."""
    x, grad, beside = normal(rows, width, 4), normal(rows, width, 5), normal(rows, width, 6)
    weight, residual = 1 + normal(1, width, 3)[0].float() / 3, beside if add else None
    _, rstd = elementwise.add_rstd(x, None, 1e-6)
    x[2, width // 2] = float("nan")
    expected, expected_weight = plainly.norm_backward(grad, x, rstd, weight, residual)
    for processors in (elementwise.MULTIPROCESSORS, 2):
        monkeypatch.setattr(elementwise, "MULTIPROCESSORS", processors)
        out, grad_weight = elementwise.norm_backward(grad, x, rstd, weight, residual)
        a, b = out.float(), expected.float()
        assert torch.equal(a.isnan(), b.isnan()) and a[2].isnan().all() and int(a.isnan().sum()) == width
        # A sum in another order moves single elements near a rounding border by one bf16 ulp of the summands.
        assert (a != b).float().mean() <= 2e-3 + 1 / rows
        torch.testing.assert_close(a, b, rtol=2.0**-7, atol=2.0**-8, equal_nan=True)
        torch.testing.assert_close(grad_weight, expected_weight, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("by", [(1, 3, 2, False), (1, 2, 1, True), (2, 3, 3, False), (3, 2, 2, True)])
def test_norm_backward_gives_the_same_rows_however_they_are_shared_out(
    by: tuple[int, int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, grad, beside, weight = (normal(rows, 648, 7 + rows) for rows in (50, 50, 50, 1))
    _, rstd = elementwise.add_rstd(x, None, 1e-6)
    expected = elementwise.norm_backward(grad, x, rstd, weight[0].float(), beside)
    monkeypatch.setattr(elementwise, "tuning", lambda width, tensors: elementwise.Tuning(*by))
    monkeypatch.setattr(elementwise, "MULTIPROCESSORS", 3)
    made = elementwise.norm_backward(grad, x, rstd, weight[0].float(), beside)
    assert (made[0] != expected[0]).float().mean() <= 2e-3
    torch.testing.assert_close(made[1], expected[1], rtol=1e-4, atol=1e-4)


def test_what_the_norm_backward_takes() -> None:
    """Every width that it takes fits into a multiprocessor."""
    for width in (8, 128, 896, 1536, 3584, 5120, 8192, 16384, elementwise.WIDEST):
        assert elementwise.supports_backward(torch.empty(1, width, dtype=torch.bfloat16))
        for tensors in (2, 3):
            by = elementwise.tuning(width, tensors)
            assert by.blocks * 2 * width * (1 + tensors * by.teams * by.stages) <= elementwise.SHARED_BYTES
            assert 32 * by.warps * by.teams * by.blocks <= 896 and by.teams <= 15, "registers, and numbers of barriers"
    for other in (torch.empty(1, 12).bfloat16(), torch.empty(1, 16), torch.empty(1, 32768).bfloat16()):
        assert not elementwise.supports_backward(other)


def same_but_for_fused_operations(made: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in the interpreter. A GPU adds products unrounded: that moves a bf16 result a step at most, and rarely."""
    if DEVICE == "cpu":
        assert torch.equal(made, expected)
        return
    apart = (made.double() - expected.double()).abs()
    # Where the terms cancel, what is left of them may be the rounding alone.
    assert (apart <= 2.0**-7 * expected.double().abs() + 2.0**-20 * expected.double().abs().max()).all()
    assert (apart > 0).double().mean() <= 1e-3


@pytest.mark.parametrize(("heads", "kv"), [(3, 1), (12, 2), (7, 7)])
def test_rope_and_bias_in_place(heads: int, kv: int) -> None:
    width, tokens, rotated = 64, 43, heads + kv
    qkv = normal(tokens, (rotated + kv) * width, 11).view(tokens, rotated + kv, width)
    bias = normal(1, (rotated + kv) * width, 12).float().flatten() * 3 + 0.001  # not what bf16 holds
    cos, sin = rope_tables(torch.arange(tokens, device=DEVICE), width, 1e6)
    expected = plainly.rope_heads(qkv, bias, cos, sin, rotated)
    same_but_for_fused_operations(rope_heads.rotate_(qkv.clone(), bias, cos, sin, rotated), expected)


@pytest.mark.parametrize("tokens", [1, 40, 700, 1025])  # a program takes 1, 1, 2 and 4 tokens, the last fewer
def test_rope_backward_in_place_and_the_gradient_of_the_bias(tokens: int) -> None:
    heads, kv, width = 3, 2, 32
    grad = normal(tokens, (heads + 2 * kv) * width, 13).view(tokens, heads + 2 * kv, width)
    cos, sin = rope_tables(torch.arange(tokens, device=DEVICE), width, 1e6)
    expected, summed = plainly.rope_heads_backward(grad, cos, sin, heads + kv)
    made, bias = rope_heads.rotate_backward_(grad.clone(), cos, sin, heads + kv)
    same_but_for_fused_operations(made, expected)
    bound = tokens * 2.0**-24 * expected.double().abs().sum(0).flatten()  # of any order of float32 additions
    for total, of in ((bias, made), (summed, expected)):
        assert ((total.double() - of.double().sum(0).flatten()).abs() <= bound).all()


@pytest.mark.parametrize("vocab", [264, 263])
def test_targets_that_do_not_exist_touch_no_other_row(vocab: int) -> None:
    """Their log-probability is NaN, and the gradient that of the softmax alone."""
    logits = normal(5, vocab, 16)
    targets = torch.tensor([3, -1, vocab, -100, vocab - 1], device=DEVICE)
    weights = torch.full((5,), 0.5, device=DEVICE)
    copy = logits.clone()
    made, expected = hopper_loss.softmax_gradient_(logits, targets, weights), copy.clone()
    known = torch.tensor([0, 4], device=DEVICE)
    found = softmax_gradient_(copy, targets.clamp(0, vocab - 1), weights)
    torch.testing.assert_close(made[known], found[known], rtol=1e-5, atol=2e-5)
    assert made[1:4].isnan().all()
    torch.testing.assert_close(logits[known], copy[known], rtol=2**-7, atol=1e-8)
    plain = 0.5 * torch.softmax(expected[1:4].float(), -1)
    torch.testing.assert_close(logits[1:4].float(), plain, rtol=2**-7, atol=1e-8)


@pytest.mark.parametrize("vocab", [260, 263, 8, 20000, 20011])
@pytest.mark.parametrize("by", [(1024, 14, 4), (256, 4, 2), (128, 2, 0), (64, 64, 9)])
def test_softmax_gradient_in_place(vocab: int, by: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fit into shared memory, that reach into registers and beyond; rows that are not aligned."""
    logits = normal(24, vocab, 15, 3.0)
    logits[5, : vocab // 2], logits[6, 3], logits[7, 2] = float("-inf"), float("nan"), float("inf")
    targets = torch.randint(0, vocab, (24,), generator=fresh.generator(1)).to(DEVICE)
    targets[:2] = torch.tensor([0, vocab - 1])
    weights = torch.rand(24, generator=fresh.generator(2)).to(DEVICE)
    weights[3] = 0
    copy = logits.clone()
    expected = softmax_gradient_(copy, targets, weights)
    monkeypatch.setattr(hopper_loss, "TUNING", hopper_loss.Tuning(*by))
    monkeypatch.setattr(hopper_loss, "MULTIPROCESSORS", 5)
    made = hopper_loss.softmax_gradient_(logits, targets, weights)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    different = (logits != copy) & ~(logits.isnan() & copy.isnan())
    assert different.float().mean() <= 1e-2  # exp differs in its last bits; a few values stand near a border
    torch.testing.assert_close(logits.float(), copy.float(), rtol=2.0**-7, atol=1e-9, equal_nan=True)
    assert not logits[3].any() and logits[6].isnan().all()
