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
    """Within what the recipe itself changes.

    Other kernels round to other bf16 values, and those round to other FP8 codes here and there: a full step of the
    format. A wrong position, key or scale changes much more than the recipe does.
    """
    made, coarser = model(recipe, "cuda"), model("infir2" if recipe == "bf16" else "bf16", "cuda")
    settings = Sampling(24, temperature, top_p=1.0 if temperature == 0 else 0.9)
    found, changed = [], []
    for prompt, answer in zip(prompts(), Generator(made, (), 3).generate(prompts(), settings), strict=True):
        batch = rows_to_batch([torch.tensor([*prompt, *answer.tokens])]).to("cuda")
        at = torch.tensor(answer.tokens, device="cuda")[:, None]
        with torch.no_grad():
            same, other = (
                torch.log_softmax(m.logits(batch)[len(prompt) - 1 :], -1).gather(1, at)[:, 0] for m in (made, coarser)
            )
        found.append((torch.tensor(answer.logprobs, device="cuda") - same).abs())
        changed.append((other - same).abs())
    apart, recipe_changes = torch.cat(found), torch.cat(changed)
    print(
        f"{recipe}: mean {apart.mean():.4f}, largest {apart.max():.4f}; the recipe changes {recipe_changes.mean():.4f}"
    )
    assert len(apart) == 120
    assert apart.mean() < (0.3 if recipe == "bf16" else 1.0) * recipe_changes.mean()
    assert apart.max() < 8 * recipe_changes.mean()
