"""Generation against transformers, against forwards without a cache, and what it must leave alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from test_engine import engine
from test_model import SHAPES, WIDE, pair, rows
from transformers import Qwen2ForCausalLM

from infir2_core.config.schema import ModelShape
from infir2_core.data.batch import rows_to_batch
from infir2_core.errors import InputError
from infir2_core.model import cache, generate
from infir2_core.model.decoder import Decoder
from infir2_core.model.generate import Generator, Sampling, sample
from infir2_core.precision.recipe import load_recipe

MORE = SHAPES | {
    "heads-of-64": ModelShape(
        layers=2, hidden=40, ffn=96, heads=6, kv_heads=2, head_dim=64, vocab=211, tied=True, max_positions=64
    )
}
LENGTHS = (7, 1, 12, 3, 12)


def prompts_of(shape: ModelShape, lengths: tuple[int, ...] = LENGTHS, seed: int = 3) -> list[list[int]]:
    return [row[:-1].tolist() for row in rows(shape, lengths, seed)]


def theirs_greedy(model: Qwen2ForCausalLM, prompt: list[int], count: int, eos: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=eos or None,
        pad_token_id=0,
    )  # fmt: skip
    return made[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def full_logprobs(model: Decoder, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Of each token, by a forward over everything before it and no cache."""
    found = []
    for n, token in enumerate(tokens):
        with torch.no_grad():
            logits = model.logits(rows_to_batch([torch.tensor([*prompt, *tokens[:n], 0])]))[-1]
        found.append(float(torch.log_softmax(logits / temperature, -1)[token]))
    return found


@pytest.mark.parametrize("batch", [2, 16])
@pytest.mark.parametrize("name", MORE)
def test_greedy_tokens_and_logprobs_equal_transformers(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK", 8)  # rooms grow several times
    monkeypatch.setattr(cache, "SPAN", 4)
    shape = MORE[name]
    ours, theirs = pair(shape, seed=5)
    prompts = prompts_of(shape)
    found = Generator(ours, (), batch).generate(prompts, Sampling(max_new_tokens=30))
    for prompt, made in zip(prompts, found, strict=True):
        assert made.tokens == theirs_greedy(theirs, prompt, 30, []) and made.finish == "length"
        assert made.logprobs == pytest.approx(full_logprobs(ours, prompt, made.tokens), abs=1e-5)


def test_an_end_token_ends_a_sequence_where_it_ends_with_transformers() -> None:
    shape = MORE["one-kv-head"]
    ours, theirs = pair(shape, seed=5)
    prompts = prompts_of(shape, (4,) * 12)
    free = Generator(ours, ()).generate(prompts, Sampling(max_new_tokens=20))
    eos = sorted({free[0].tokens[2], free[1].tokens[5]})
    found = Generator(ours, eos, 5).generate(prompts, Sampling(max_new_tokens=20))
    for prompt, made in zip(prompts, found, strict=True):
        assert made.tokens == theirs_greedy(theirs, prompt, 20, eos)
        assert made.finish == ("stop" if made.tokens[-1] in eos else "length")
        assert len(made.tokens) == len(made.logprobs) and not set(made.tokens[:-1]) & set(eos)
    assert {made.finish for made in found} == {"stop", "length"} and len({len(m.tokens) for m in found}) > 4


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_sequence_does_not_depend_on_its_neighbours(temperature: float) -> None:
    shape = MORE["one-kv-head"]
    ours, _ = pair(shape, seed=2)
    prompts, settings = prompts_of(shape, (5, 9, 1, 30, 2, 5)), Sampling(25, temperature, top_p=0.95, seed=4)
    eos = (3, 17, 31)
    together = Generator(ours, eos, 6).generate(prompts, settings)
    for batch in (1, 2, 3):
        for a, b in zip(together, Generator(ours, eos, batch).generate(prompts, settings), strict=True):
            assert (a.tokens, a.finish) == (b.tokens, b.finish) and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert len({len(made.tokens) for made in together}) > 2, "sequences of different length, so that rows moved"


def test_tokens_come_one_by_one_and_in_order() -> None:
    shape = MORE["tied-gqa"]
    ours, _ = pair(shape, seed=5)
    prompts = prompts_of(shape)
    generator, settings = Generator(ours, (), 2), Sampling(6, temperature=0.8)
    tokens = list(generator.stream(prompts, settings))
    assert [t.prompt for t in tokens[:4]] == [0, 1, 0, 1], "both of the batch, before either is done"
    for number, made in enumerate(generator.generate(prompts, settings)):
        own = [t for t in tokens if t.prompt == number]
        assert [t.token for t in own] == made.tokens and [t.logprob for t in own] == made.logprobs
        assert [t.finish for t in own] == [None] * 5 + ["length"]


def test_the_last_position_of_the_model_ends_a_sequence() -> None:
    shape = MORE["tied-gqa"]
    ours, theirs = pair(shape, seed=5)
    (prompt,) = prompts_of(shape, (60,))
    (made,) = Generator(ours, ()).generate([prompt], Sampling(max_new_tokens=50))
    assert made.tokens == theirs_greedy(theirs, prompt, 4, []) and made.finish == "length"


def test_long_prompts_are_prefilled_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = MORE["tied-gqa"]
    ours, _ = pair(shape, seed=5)
    prompts = prompts_of(shape, (20, 3, 9, 20, 11))
    expected = Generator(ours, ()).generate(prompts, Sampling(9))
    monkeypatch.setattr(generate, "PREFILL", 12)
    found = Generator(ours, ()).generate(prompts, Sampling(9))
    assert [made.tokens for made in found] == [made.tokens for made in expected]


def test_padding_for_the_kernels_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = MORE["tied-gqa"]
    ours, _ = pair(shape, seed=5)
    prompts = prompts_of(shape)
    expected = Generator(ours, (), 3).generate(prompts, Sampling(12))
    seen = set()

    def padded(self: Generator, tokens: int) -> int:
        seen.add(-tokens % 8)
        return -tokens % 8

    monkeypatch.setattr(Generator, "_padding", padded)
    found = Generator(ours, (), 3).generate(prompts, Sampling(12))
    assert [made.tokens for made in found] == [made.tokens for made in expected] and max(seen) > 1


def truncated(logits: torch.Tensor, settings: Sampling) -> list[float]:
    """Probabilities after temperature, top-k and top-p, the slow way."""
    weights = {i: float(p) for i, p in enumerate(torch.softmax(logits.double() / settings.temperature, -1))}
    order = sorted(weights, key=lambda i: -weights[i])[: settings.top_k or len(weights)]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if mass >= settings.top_p:
            break
    share = sum(weights[i] for i in kept)
    return [weights[i] / share if i in kept else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.5, 0.8, 0), (1.0, 1.0, 4), (1.2, 0.75, 6)]
)
def test_samples_follow_the_truncated_softmax(temperature: float, top_p: float, top_k: int) -> None:
    settings, count = Sampling(1, temperature, top_p, top_k, seed=11), 20000
    logits = torch.randn(11, generator=torch.Generator().manual_seed(1)) * 1.5
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, logprobs = sample(logits.repeat(count, 1), uniform, settings)
    expected, drawn = truncated(logits, settings), Counter(tokens.tolist())
    assert set(drawn) <= {i for i, p in enumerate(expected) if p > 0}
    parts = [(drawn[i] - count * p) ** 2 / (count * p) for i, p in enumerate(expected) if p > 0]
    # 99.9 % quantile of chi-square with k degrees of freedom (Wilson and Hilferty's approximation).
    k = len(parts) - 1
    assert k >= 2 and sum(parts) < k * (1 - 2 / (9 * k) + 3.09 * (2 / (9 * k)) ** 0.5) ** 3
    at_temperature = torch.log_softmax(logits.double() / temperature, -1)
    assert logprobs.tolist() == pytest.approx([float(at_temperature[t]) for t in tokens.tolist()], abs=1e-5)


def test_the_ends_of_the_random_numbers_choose_tokens_that_were_kept() -> None:
    logits = torch.tensor([[0.0, -1.0, 2.0, 1.0, -300.0]]).repeat(2, 1)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample(logits, ends, Sampling(1, 1.0))[0].tolist() == [0, 3]
    assert sample(logits, ends, Sampling(1, 1.0, top_k=2))[0].tolist() == [2, 3]
    assert sample(logits, ends, Sampling(1, 1.0, top_p=1e-9))[0].tolist() == [2, 2]
    for tiny in (1e-37, 1e-42, 1e-300, 5e-324):
        tokens, logprobs = sample(logits, ends, Sampling(1, tiny))
        assert (tokens.tolist(), logprobs.tolist()) == ([2, 2], [0, 0])


def test_draws_of_a_model_follow_its_distribution_and_repeat_by_seed() -> None:
    shape = ModelShape(layers=1, hidden=16, ffn=16, heads=2, kv_heads=1, head_dim=8, vocab=7, tied=True)
    ours, _ = pair(shape, seed=1)
    prompt, count = [3, 1, 4], 3000
    with torch.no_grad():
        logits = ours.logits(rows_to_batch([torch.tensor([*prompt, 0])]))[-1]
    settings = Sampling(1, temperature=2.0, seed=5)
    generator = Generator(ours, (), 500)
    found = generator.generate([prompt] * count, settings)
    drawn = Counter(made.tokens[0] for made in found)
    parts = [(drawn[i] - count * p) ** 2 / (count * p) for i, p in enumerate(truncated(logits, settings))]
    assert sum(parts) < 22.5, "99.9 % quantile of chi-square, 6 degrees of freedom"
    longer = Sampling(8, temperature=2.0, seed=5)
    assert generator.generate([prompt] * 9, longer) == generator.generate([prompt] * 9, longer)
    other = generator.generate([prompt] * 9, Sampling(8, temperature=2.0, seed=6))
    assert [m.tokens for m in other] != [m.tokens for m in generator.generate([prompt] * 9, longer)]
    for made in other:
        assert made.logprobs == pytest.approx(full_logprobs(ours, prompt, made.tokens, 2.0), abs=1e-5)


ROWWISE = ["bf16", "infir2", "infir2-lean", "infir2-fp32-scales", "fp8-rowwise", "mxfp8", "infir2-fp8-head"]


@pytest.mark.parametrize("recipe", ROWWISE)
def test_recipes_generate_what_forwards_without_a_cache_give(recipe: str) -> None:
    """Sums in another order seldom round to another bf16 number or code; then a log-probability moves a little."""
    model = Decoder(WIDE, load_recipe(recipe))
    apart, count = 0, 0
    for seed in range(3):
        model.initialise(0.15, seed)
        prompts = prompts_of(WIDE, (9, 4, 20), seed)
        for prompt, made in zip(prompts, Generator(model, (), 2).generate(prompts, Sampling(8)), strict=True):
            expected = full_logprobs(model, prompt, made.tokens)
            assert made.logprobs == pytest.approx(expected, abs=0.1)
            apart += sum(abs(a - b) > 1e-5 for a, b in zip(made.logprobs, expected, strict=True))
            count += len(expected)
            for n, logprob in enumerate(expected):  # the most likely one, but for such a difference
                with torch.no_grad():
                    logits = model.logits(rows_to_batch([torch.tensor([*prompt, *made.tokens[:n], 0])]))[-1]
                assert logprob >= float(torch.log_softmax(logits, -1).max()) - (1e-5 if apart == 0 else 0.1)
    assert count == 72 and apart <= 9


@pytest.mark.parametrize("recipe", ["bf16", "infir2", "infir2-lean", "infir2-fp8-head", "fp8-delayed", "fp8-current"])
def test_generation_between_two_steps_changes_no_bit_of_training(recipe: str) -> None:
    batches = [[rows_to_batch(rows(WIDE, (30, 30), seed=s))] for s in range(4)]
    with_it, without = engine(recipe), engine(recipe)
    generator = Generator(with_it.model, (0,), 2)
    for batch in batches:
        random_state = torch.get_rng_state()
        for settings in (Sampling(5), Sampling(5, temperature=1.0)):
            generator.generate(prompts_of(WIDE, (3, 8, 5)), settings)
        assert torch.equal(torch.get_rng_state(), random_state) and torch.is_grad_enabled()
        assert with_it.train_step(batch, 1e-3).result() == without.train_step(batch, 1e-3).result()
    assert all(torch.equal(t, without.tensors()[n]) for n, t in with_it.tensors().items())


def test_it_generates_with_the_weights_of_the_moment() -> None:
    made = engine("infir2")
    generator, prompts = Generator(made.model, ()), prompts_of(WIDE)
    before = generator.generate(prompts, Sampling(6))
    for step in range(3):
        made.train_step([rows_to_batch(rows(WIDE, (30, 30), seed=step))], 1e-2).result()
    after = generator.generate(prompts, Sampling(6))
    assert after != before
    fresh = engine("infir2")
    fresh.load({n: t.clone() for n, t in made.tensors().items()}, made.state(), optimizer=False, where="test")
    assert Generator(fresh.model, ()).generate(prompts, Sampling(6)) == after


@pytest.mark.parametrize(
    ("prompts", "what", "where"),
    [
        ([[1], []], "no tokens", "prompt 2"),
        ([[1, 97]], "token id 97 is outside the model's vocabulary of 97", "prompt 1"),
        ([[-1]], "token id -1", "prompt 1"),
        ([[0] * 64], "64 tokens, the model 64 positions", "prompt 1"),
    ],
)
def test_prompts_that_cannot_be_continued(prompts: Any, what: str, where: str) -> None:
    ours, _ = pair(MORE["tied-gqa"], seed=5)
    with pytest.raises(InputError, match=what) as caught:
        Generator(ours, ()).generate(prompts, Sampling(3))
    assert caught.value.where == where
    assert Generator(ours, ()).generate([], Sampling(3)) == []


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.01}, "--top-p"),
        ({"top_k": -1}, "--top-k"),
    ],
)
def test_settings_that_make_no_sense(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(InputError) as caught:
        Sampling(**values)
    assert caught.value.where == flag
