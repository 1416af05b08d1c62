"""The feed of fine-tuning: every sample its number of times, shares of ranks, packed microbatches, one loss."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import sft_config, write_chats
from hypothesis import given
from hypothesis import strategies as st

from infir2_core.config.schema import ALIGNMENT, RunConfig
from infir2_core.data.batch import Batch, filled, rows_to_batch
from infir2_core.data.chat_set import ChatSet
from infir2_core.data.packing import pack, packed_batch
from infir2_core.engines.native import NativeEngine
from infir2_core.engines.ranks import Ranks
from infir2_core.errors import InputError
from infir2_core.model.decoder import Decoder
from infir2_core.precision.recipe import load_recipe
from infir2_core.train.chat_feed import ChatFeed, size_of, split


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 61)


def rows_of(batch: Batch) -> list[tuple[int, ...]]:
    """The tokens of each sequence of a batch, fillers (weight 0 throughout) left out."""
    parts = zip(batch.tokens_T.split(batch.lengths), batch.weights_T.split(batch.lengths), strict=True)
    return [tuple(tokens.tolist()) for tokens, weights in parts if weights.any()]


def samples_of(chats: ChatSet) -> Counter[tuple[int, ...]]:
    return Counter(tuple(chats.sample(i).tokens[:-1].tolist()) for i in range(len(chats)))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_is_trained_on_exactly_epochs_times(tmp_path: Path, chats: Path, world: int) -> None:
    config = sft_config(tmp_path, chats, epochs=3)
    assert config.sft and config.chat
    assert (config.chat.samples, config.chat.held_out) == (55, 6)
    assert config.sft.steps == 21, "165 samples in batches of 8, the last of 5"
    feeds = [ChatFeed(config, Ranks(rank, world)) for rank in range(world)]
    seen: Counter[tuple[int, ...]] = Counter()
    done = tokens = 0
    for step in range(config.sft.steps):
        shares = [feed.step(done) for feed in feeds]
        assert len({(s.samples, s.tokens, s.filler, s.context) for s in shares}) == 1, "all ranks tell the same"
        batches = [batch for share in shares for batch in share.batches]
        found = [row for batch in batches for row in rows_of(batch)]
        assert len(found) == shares[0].samples == (8 if step < 20 else 5)
        assert all(len(batch.tokens_T) % ALIGNMENT == 0 and len(batch.tokens_T) <= 512 for batch in batches)
        assert sum(len(batch.tokens_T) for batch in batches) == shares[0].tokens + shares[0].filler
        assert sum(map(len, found)) == shares[0].tokens
        assert shares[0].context == pytest.approx(sum(len(row) ** 2 for row in found) / shares[0].tokens)
        seen.update(found)
        done, tokens = done + shares[0].samples, tokens + shares[0].tokens
    assert seen == {row: 3 * count for row, count in samples_of(feeds[0].chats).items()}
    assert tokens == 3 * config.chat.tokens


def test_epochs_have_orders_of_their_own_and_a_seed_decides_them(tmp_path: Path, chats: Path) -> None:
    def steps(seed: int) -> list[list[tuple[int, ...]]]:
        feed = ChatFeed(sft_config(tmp_path, chats, epochs=2, global_batch=5, seed=seed), Ranks())
        return [
            sorted(row for batch in feed.step(start).batches for row in rows_of(batch)) for start in range(0, 110, 5)
        ]

    found = steps(1)
    first, second = (Counter(row for step in half for row in step) for half in (found[:11], found[11:]))
    assert first == second and found[:11] != found[11:], "both epochs hold the same samples, in another order"
    assert found == steps(1) and found != steps(2)


def test_held_out_samples_are_never_trained_on(tmp_path: Path, chats: Path) -> None:
    config = sft_config(tmp_path, chats)
    for world in (1, 2):
        feeds = [ChatFeed(config, Ranks(rank, world)) for rank in range(world)]
        held = Counter(row for feed in feeds for batch in feed.held_out() or () for row in rows_of(batch))
        assert held == samples_of(feeds[0].held)
        assert not set(held) & set(samples_of(feeds[0].chats))
    assert ChatFeed(sft_config(tmp_path, chats, eval_share=0.0), Ranks()).held_out() is None
    assert ChatFeed(sft_config(tmp_path, chats, eval_every=0), Ranks()).held_out() is None


def test_prompts_end_where_the_first_answer_begins(tmp_path: Path, chats: Path) -> None:
    feed = ChatFeed(sft_config(tmp_path, chats), Ranks())
    prompts = feed.prompts(3)
    assert len(prompts) == 3
    opening = list(b"assistant\n")
    for i, prompt in enumerate(prompts):
        sample = feed.held.sample(i)
        assert prompt == sample.tokens[: len(prompt)].tolist() and prompt[-len(opening) :] == opening
        assert not sample.weights[: len(prompt) - 1].any() and sample.weights[len(prompt) - 1] == 1
    assert len(feed.prompts(99)) == 6


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.integers(1, 8))
def test_ranks_get_about_the_same_number_of_tokens(lengths: list[int], parts: int) -> None:
    groups = split(np.array(lengths), parts)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in group) for group in groups]
    assert max(sums) - min(sums) <= max(lengths)


@given(st.integers(1, 300), st.data())
def test_microbatches_have_few_sizes_and_little_filler(blocks: int, data: st.DataObject) -> None:
    row = blocks * ALIGNMENT
    tokens = data.draw(st.integers(1, row))
    size = size_of(tokens, row)
    assert tokens <= size <= row and size % ALIGNMENT == 0
    assert size - tokens < max(ALIGNMENT, row / 64)
    assert len({size_of(n, row) for n in range(1, row + 1, ALIGNMENT)}) <= 128


def test_a_realistic_mix_in_rows_of_32k_is_padded_by_less_than_one_percent() -> None:
    """64 samples a step, log-normal with a median of 4,000 tokens and sigma 0.9, seed 3."""
    random = np.random.default_rng(3)
    for _ in range(20):
        lengths = np.clip(random.lognormal(np.log(4000), 0.9, 64), 16, 32768).astype(int)
        sizes = [int(lengths[row].sum()) for row in pack(lengths, 32768)]
        filler = sum(size_of(size, 32768) - size for size in sizes)
        assert filler / (lengths.sum() + filler) < 0.01


def test_a_filler_changes_neither_loss_nor_gradient() -> None:
    rows = [torch.randint(0, 256, (n,)) for n in (30, 45, 20)]
    plain = rows_to_batch(rows)
    full = filled(plain, 128)
    assert len(full.tokens_T) == 128 and full.lengths == (29, 44, 19, 36) and not full.weights_T[92:].any()
    assert full.positions_T[92:].tolist() == list(range(36))
    assert filled(full, 128) is full
    found = []
    for batch in (plain, full):
        model = Decoder(SHAPE, load_recipe("fp32"))
        model.initialise(0.05, seed=1)
        loss, _ = model.loss(batch, batch.weights_T / plain.weights_T.sum())
        loss.backward()
        found.append((float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, grad in found[0][1].items():
        assert torch.allclose(grad, found[1][1][name], atol=1e-6), name


@pytest.mark.parametrize("recipe", ["infir2", "fp8-rowwise"])
def test_under_fp8_a_filler_reaches_scales_of_weight_gradients_alone(recipe: str) -> None:
    """The loss keeps its bits, gradients that no wgrad makes their values; fillers share blocks of wgrad's operands."""
    rows = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)) for n in (30, 45, 20)]
    plain = rows_to_batch(rows)
    found = []
    for batch in (plain, filled(plain, 128)):
        model = Decoder(SHAPE, load_recipe(recipe))
        model.initialise(0.05, seed=1)
        loss, _ = model.loss(batch, batch.weights_T / plain.weights_T.sum())
        loss.backward()
        found.append((float(loss.detach()), {n: p.grad.float() for n, p in model.named_parameters()}))
    assert found[0][0] == found[1][0]
    linears = {f"{name}.weight" for name, _ in model.linears()}
    for name, grad in found[0][1].items():
        off = float((grad - found[1][1][name]).norm() / grad.norm())
        assert off < (0.05 if name in linears else 1e-5), (name, off)


def shape() -> Any:
    from infir2_core.config.schema import ModelShape

    return ModelShape(
        layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=260, tied=True, max_positions=512
    )


SHAPE = shape()


def engine(config: RunConfig, ranks: Ranks | None = None) -> NativeEngine:
    """A small fp32 engine with a large eps, so that AdamW does not blow up rounding noise."""
    assert config.sft
    sft = config.sft.model_copy(update={"recipe": "fp32", "eps": 1e-2})
    made = NativeEngine(config.model_copy(update={"model": SHAPE, "sft": sft}), load_recipe("fp32"), ranks or Ranks())
    made.model.initialise(0.05, seed=4)
    return made


def test_the_loss_is_a_mean_over_the_trained_tokens_of_the_global_batch(tmp_path: Path, chats: Path) -> None:
    """Against samples one by one, summed by hand: however they are packed and however uneven they are."""
    config = sft_config(tmp_path, chats)
    feed = ChatFeed(config, Ranks())
    share = feed.step(0)
    assert len(share.batches) > 1
    whole = engine(config)
    result = whole.train_step(share.batches, 1e-3).result()
    order = [feed._orders(0)[i] for i in range(8)]
    alone, total, trained = engine(config), 0.0, 0.0
    batches = [packed_batch([feed.chats.sample(int(i))]) for i in order]
    for batch in batches:
        logprobs = alone.model.logprobs(batch)
        total -= float((batch.weights_T * logprobs.detach()).sum())
        trained += float(batch.weights_T.sum())
    assert result.trained == trained
    assert result.loss == pytest.approx(total / trained, rel=1e-5)
    one_by_one = alone.train_step(batches, 1e-3).result()
    assert one_by_one.loss == pytest.approx(result.loss, rel=1e-6)
    assert one_by_one.grad_norm == pytest.approx(result.grad_norm, rel=1e-5)
    for (name, p), q in zip(whole.model.named_parameters(), alone.model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=2e-6), name


RANKS = """
import json, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {unit!r}]
from chats import sft_config
from test_feed import engine
from infir2_core.engines.ranks import Ranks
from infir2_core.train.chat_feed import ChatFeed

ranks = Ranks.join({world}, "cpu")
config = sft_config(Path({folder!r}), Path({data!r}), epochs=1)
feed, made = ChatFeed(config, ranks), engine(config, ranks)
found = []
for start in (0, 8, 16, {last}):
    share = feed.step(start)
    result = made.train_step(share.batches, 1e-3).result()
    held = made.evaluate(feed.held_out())
    found.append([result.loss, result.grad_norm, result.trained, held, len(share.batches)])
print(json.dumps(found))
ranks.leave()
"""


def test_ranks_with_different_numbers_of_microbatches_equal_one_rank(tmp_path: Path, chats: Path) -> None:
    """Also in the last step, which has one sample and so nothing for the second rank."""
    import json
    import socket

    root = Path(__file__).resolve().parents[2]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    values = {"tests": str(root / "tests"), "unit": str(root / "tests/unit"), "folder": str(tmp_path)}
    sft_config(tmp_path, chats, epochs=1)  # tokenised once, for all

    def start(rank: int, world: int) -> subprocess.Popen[str]:
        code = RANKS.format(**values, data=str(chats), world=world, last=54)
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        env |= os.environ | {"MASTER_PORT": port, "PYTHONPATH": str(root)}
        return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)

    (alone,) = (json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in [start(0, 1)])
    pair = [start(0, 2), start(1, 2)]
    both = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in pair]
    assert [step[4] for step in both[0]][-1] + [step[4] for step in both[1]][-1] == 1
    for step, first, second in zip(alone, *both, strict=True):
        assert first[:4] == second[:4]
        assert first[2] == step[2]
        assert first[0] == pytest.approx(step[0], rel=1e-5)
        assert first[1] == pytest.approx(step[1], rel=1e-4)
        assert first[3] == pytest.approx(step[3], rel=1e-5)


def test_other_chats_than_those_of_the_run_are_refused(tmp_path: Path, chats: Path) -> None:
    config = sft_config(tmp_path, chats)
    other = write_chats(tmp_path / "other.jsonl", 20, seed=9)
    data = [config.data[0].model_copy(update={"prefix": str(other)})]
    with pytest.raises(InputError, match="not those that the run began with"):
        ChatFeed(config.model_copy(update={"data": data}), Ranks())
