"""Generation on a GPU: the tokens of the CPU in float32, and forwards without a cache in the fast recipes."""

from __future__ import annotations

import pytest
import torch

from infir2_core.config.schema import ModelShape
from infir2_core.data.batch import rows_to_batch
from infir2_core.model.decoder import Decoder
from infir2_core.model.generate import Generator, Sampling
from infir2_core.precision.recipe import load_recipe

pytestmark = pytest.mark.gpu
SHAPE = ModelShape(
    layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=64, vocab=384, tied=True, max_positions=1024
)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, SHAPE.vocab, (n,), generator=generator).tolist() for n in (5, 130, 1, 77, 40)]


def model(recipe: str, device: str) -> Decoder:
    made = Decoder(SHAPE, load_recipe(recipe), device)
    made.initialise(0.15, seed=4)
    return made


def test_greedy_tokens_in_float32_are_those_of_the_cpu() -> None:
    here, there = (Generator(model("fp32", d), (), 3).generate(prompts(), Sampling(40)) for d in ("cpu", "cuda"))
    for a, b in zip(here, there, strict=True):
        assert a.tokens == b.tokens and a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


@pytest.mark.parametrize("recipe", ["bf16", "infir2", "infir2-lean"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_a_forward_without_a_cache(recipe: str, temperature: float) -> None:
    made, count, apart = model(recipe, "cuda"), 0, 0.0
    settings = Sampling(24, temperature, top_p=1.0 if temperature == 0 else 0.9)
    for prompt, answer in zip(prompts(), Generator(made, (), 3).generate(prompts(), settings), strict=True):
        with torch.no_grad():
            batch = rows_to_batch([torch.tensor([*prompt, *answer.tokens])]).to("cuda")
            logprobs = torch.log_softmax(made.logits(batch)[len(prompt) - 1 :], -1)
        expected = logprobs.gather(1, torch.tensor(answer.tokens, device="cuda")[:, None])[:, 0].tolist()
        assert answer.logprobs == pytest.approx(expected, abs=0.3)
        apart += sum(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True))
        count += len(expected)
    assert count == 120 and apart / count < 0.03
