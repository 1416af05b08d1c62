"""The loss kernel where multiplications and additions become one operation, as a GPU's compiler makes them."""

from __future__ import annotations

from functools import partial

import cuda_on_cpu
import fresh
import pytest
import torch

from infir2_core.ops.hopper import cuda, loss
from infir2_core.ops.reference.loss import softmax_gradient_

pytestmark = pytest.mark.skipif(not cuda_on_cpu.fuses(), reason="no g++, or a processor without fused operations")
SAFE, FUSIBLE = "power2((largest - top) * LOG2E) + sum", "power2(largest * LOG2E - base) + sum"
# Whatever is fused, the base of a vector's powers is rounded once, as nvcc has it. g++ would fuse it itself.
BASE, ROUNDED = "const float base = top * LOG2E;", 'float base = top * LOG2E; asm("" : "+x"(base));'
VOCABS = [1600, 1603]  # in vectors, and one by one


@pytest.fixture(autouse=True)
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    text = cuda.source("softmax_gradient.cu", without="ptx.cuh")
    assert text.count(SAFE) == text.count(BASE) == 1
    text = text.replace(BASE, ROUNDED)
    monkeypatch.setattr(cuda, "source", lambda file, without: text)
    monkeypatch.setattr(loss, "launch", partial(cuda_on_cpu.launch, options=cuda_on_cpu.FUSED))
    monkeypatch.setattr(loss, "TUNING", loss.Tuning(64, 2, 1))
    monkeypatch.setattr(loss, "MULTIPROCESSORS", 2)
    return text


def half_infinite(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits whose first half is -inf in some rows, so that every thread begins with nothing but -inf."""
    logits = (3 * torch.randn(6, vocab, generator=fresh.generator(vocab))).bfloat16()
    logits[1::2, : vocab // 2] = float("-inf")
    targets = torch.arange(vocab // 2 + 5, vocab, vocab // 20)[:6]
    return logits, targets, torch.rand(6, generator=fresh.generator(3))


@pytest.mark.parametrize("vocab", VOCABS)
def test_rows_that_begin_with_infinities(vocab: int) -> None:
    logits, targets, weights = half_infinite(vocab)
    copy = logits.clone()
    expected, made = softmax_gradient_(copy, targets, weights), loss.softmax_gradient_(logits, targets, weights)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.float(), copy.float(), rtol=2.0**-7, atol=1e-9)
    assert not logits[1::2, : vocab // 2].any()


@pytest.mark.parametrize("vocab", VOCABS)
def test_these_rows_tell_a_difference_of_products(vocab: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the expression that must not be written they give no numbers."""
    monkeypatch.setattr(cuda, "source", lambda file, without: text.replace(SAFE, FUSIBLE))
    logits, targets, weights = half_infinite(vocab)
    made = loss.softmax_gradient_(logits, targets, weights)
    assert made[::2].isfinite().all() and not made[1::2].isfinite().any()
