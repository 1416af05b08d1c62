"""A quantised LM head: its numbers against a head written out, its independence of chunks, when its weight is made."""

from __future__ import annotations

import pytest
import torch

from infir2_core.config.schema import ModelShape
from infir2_core.data.batch import Batch, rows_to_batch
from infir2_core.model.decoder import Decoder, operands_of
from infir2_core.model.head import HeadWeight
from infir2_core.ops import loss as training
from infir2_core.ops.dispatch import ledger
from infir2_core.ops.loss import linear_cross_entropy
from infir2_core.ops.reference import loss as scoring
from infir2_core.ops.reference.loss import Head, float_logits, linear_logprob
from infir2_core.ops.reference.quantize import QTensor, quantize
from infir2_core.precision.recipe import FOLDER, Recipe, load_recipe, parse
from infir2_core.precision.spec import QSpec, QuantPlan

TILE, SQUARE = (QSpec(format="e4m3", block=block, scale="pow2") for block in ((1, 128), (128, 128)))
TOKENS, VOCAB, HIDDEN = 300, 200, 160  # neither divides by 128
SHAPE = ModelShape(
    layers=1, hidden=128, ffn=128, heads=2, kv_heads=1, head_dim=64, vocab=160, tied=True, max_positions=512
)


def data() -> tuple[torch.Tensor, torch.nn.Parameter, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(0.2 * torch.randn(VOCAB, HIDDEN, generator=generator))
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return x, weight, targets, torch.rand(TOKENS, generator=generator) / TOKENS


def head_of(weight: torch.nn.Parameter, name: str = "infir2-fp8-head") -> Head:
    recipe = load_recipe(name)
    head = HeadWeight(operands_of(recipe, recipe.policy_for("head", "head")), torch.bfloat16).read(weight, True)
    assert isinstance(head, Head)
    return head


def values(x: torch.Tensor, spec: QSpec, axis: int) -> torch.Tensor:
    """The tensor as a GEMM sees its row (1) or column (0) copy, in the layout of x."""
    made = quantize(x, QuantPlan(row=spec) if axis else QuantPlan(col=spec))
    q = made.row if axis else made.col
    assert q is not None
    return q.dequantize() if axis else q.dequantize().T


def test_loss_and_gradients_are_those_of_quantised_operands() -> None:
    x, weight, targets, weights = data()
    loss, logprobs = linear_cross_entropy(x, weight, head_of(weight), targets, weights)
    loss.backward()
    w = values(weight.detach().bfloat16(), SQUARE, 1)
    logits = (values(x.detach(), TILE, 1) @ w.T).bfloat16()
    expected = torch.log_softmax(logits.float(), -1)
    chosen = expected.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, chosen, rtol=1e-5, atol=5e-2)  # a logit may round to the other bf16 neighbour
    assert float((logprobs - chosen).abs().mean()) < 1e-3
    g = (weights[:, None] * (expected.exp() - torch.nn.functional.one_hot(targets, VOCAB))).bfloat16()
    grad_x, grad_weight = values(g, TILE, 1) @ w, values(g, TILE, 0).T @ values(x.detach(), TILE, 0)
    assert x.grad is not None and weight.grad is not None
    for made, truth in ((x.grad.float(), grad_x), (weight.grad, grad_weight)):
        assert torch.linalg.norm(made - truth) < 5e-3 * torch.linalg.norm(truth)


@pytest.mark.parametrize("chunk", [1, 128 * VOCAB * 14, 1 << 30])
def test_chunks_change_no_code(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (1 << 30, chunk):
        monkeypatch.setattr(training, "CHUNK_BYTES", size)
        monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", size // 14)
        x, weight, targets, weights = data()
        head = head_of(weight)
        loss, logprobs = linear_cross_entropy(x, weight, head, targets, weights)
        loss.backward()
        grads = x.grad, weight.grad
        x.grad = weight.grad = None
        linear_logprob(x, weight, head, targets).backward(weights)
        results.append((logprobs, *grads, x.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    sizes = [rows.stop - rows.start for rows in training._chunks(x.detach(), head)]
    assert all(size % 128 == 0 for size in sizes[:-1]) and sum(sizes) == TOKENS
    assert len(sizes) == (3 if chunk < 1 << 30 else 1)


def test_scoring_has_the_gradients_of_training() -> None:
    """Float32 logits in one, bf16 ones in the other: the same codes but for a few."""
    x, weight, targets, weights = data()
    head = head_of(weight)
    linear_cross_entropy(x, weight, head, targets, weights)[0].backward()
    assert x.grad is not None and weight.grad is not None
    trained = [x.grad.float(), weight.grad.clone()]
    x.grad = weight.grad = None
    (-weights * linear_logprob(x, weight, head, targets)).sum().backward()
    for made, expected in zip((x.grad.float(), weight.grad), trained, strict=True):  # type: ignore[attr-defined]
        assert torch.linalg.norm(made - expected) < 0.03 * torch.linalg.norm(expected)


def test_a_copy_of_x_may_be_shifted_in_the_head_too() -> None:
    text = (FOLDER / "infir2-codes-shift.toml").read_text().replace('use = "bf16"', 'use = "default"')
    recipe = parse(text, "test")
    assert recipe.missing() == []
    made = []
    for policy in (recipe, load_recipe("infir2-fp8-head")):
        x, weight, targets, weights = data()
        operands = operands_of(policy, policy.policy_for("head", "head"))
        head = HeadWeight(operands, torch.bfloat16).read(weight, True)
        linear_cross_entropy(x, weight, head, targets, weights)[0].backward()
        assert weight.grad is not None
        trained = weight.grad.clone()
        linear_logprob(x, weight, head, targets).backward(-weights)
        assert torch.linalg.norm(weight.grad - 2 * trained) < 0.05 * torch.linalg.norm(trained)
        made.append(trained)
    assert 0 < torch.linalg.norm(made[0] - made[1]) < 0.01 * torch.linalg.norm(made[1])


def model(recipe: str | Recipe) -> tuple[Decoder, Batch]:
    made = Decoder(SHAPE, load_recipe(recipe) if isinstance(recipe, str) else recipe)
    made.initialise(0.1, seed=5)
    generator = torch.Generator().manual_seed(7)
    return made, rows_to_batch([torch.randint(0, 160, (129,), generator=generator) for _ in range(2)])


def test_the_decoder_counts_and_reports_its_head() -> None:
    decoder, batch = model("infir2-fp8-head")
    ledger.start()
    decoder.loss(batch, torch.full((256,), 1 / 256))[0].backward()
    counts = {(o, by): n for (gemm, o, by), n in ledger.stop().items() if gemm == "head"}
    tile, square = TILE.label(), SQUARE.label()
    assert counts == {(f"{tile} x {square}", "reference"): 2, (f"{tile} x {tile}", "reference"): 1}
    assert len(decoder.nonfinite_values) == 5 and int(decoder.nonfinite_values.sum()) == 0
    with torch.no_grad():
        decoder.norm[3] = float("inf")
        decoder.logprobs(batch)
        assert int(decoder.nonfinite_values.sum()) == 0, "evaluation counts nothing"
    decoder.loss(batch, torch.ones(256))
    assert int(decoder.nonfinite_values[-1]) >= 256


def test_every_step_hears_of_an_infinite_weight() -> None:
    """Though its codes, in which the infinity is 448, were made before the count was cleared."""
    decoder, batch = model("infir2-fp8-head")
    with torch.no_grad():
        decoder.embed[3, 5] = float("inf")
        decoder.embed[4, 6] = float("nan")
    for _ in range(2):
        decoder.nonfinite_values.zero_()
        head = decoder.lm_head.read(decoder.embed, True)
        assert int(decoder.nonfinite_values[-1]) == int(decoder.nonfinite_values.sum()) == 2
    assert isinstance(head, Head) and head.counter is decoder.lm_head.nonfinite_values
    decoder.lm_head.read(decoder.embed, False)
    assert int(decoder.nonfinite_values[-1]) == 2


def test_the_weight_is_quantised_once_a_step() -> None:
    decoder, batch = model("infir2-fp8-head")

    def codes() -> torch.Tensor:
        head = decoder.lm_head.read(decoder.embed, True)
        assert isinstance(head, Head) and isinstance(head.fprop, QTensor)
        return head.fprop.data

    first = codes()
    decoder.loss(batch, torch.ones(256))
    assert codes() is first
    decoder.end_step()
    assert codes() is not first
    first = codes()
    with torch.no_grad():
        decoder.embed.mul_(2)
    assert codes() is not first


def test_logits_and_scores_are_of_the_same_head() -> None:
    decoder, batch = model("infir2-fp8-head")
    with torch.no_grad():
        logits, logprobs = decoder.logits(batch), decoder.logprobs(batch)
    expected = torch.log_softmax(logits, -1).gather(1, batch.targets_T[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    plain, _ = model("infir2")
    assert 0 < float((plain.logits(batch) - logits).abs().max()) < 0.2 * float(logits.abs().max())


def test_a_head_for_a_forward_alone_refuses_a_backward() -> None:
    x, weight, targets, _ = data()
    operands = operands_of(load_recipe("infir2-fp8-head"), load_recipe("infir2-fp8-head").policy["default"])
    head = HeadWeight(operands, torch.bfloat16).read(weight, False)
    assert isinstance(head, Head) and head.dgrad is None and float_logits(x.detach(), head).shape == (TOKENS, VOCAB)
    with pytest.raises(ValueError, match="without the copy"):
        linear_logprob(x, weight, head, targets).sum().backward()
