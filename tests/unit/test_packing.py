"""Packing: rows against a slow best-fit and simple bounds, and packed batches against their samples one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infir2_core.config.schema import ModelShape
from infir2_core.data.chat_set import ChatSample
from infir2_core.data.packing import pack, packed_batch, padded_share, unfilled_share
from infir2_core.model.decoder import Decoder
from infir2_core.precision.recipe import load_recipe

ROW = 32768
LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def realistic(count: int, seed: int) -> np.ndarray:
    """Log-normal lengths with a median of 4,000 tokens, cut at 32k: a long tail, mean about 5,800."""
    lengths = np.random.default_rng(seed).lognormal(np.log(4000), 0.9, count)
    return np.clip(lengths, 32, ROW).astype(np.int64)


def slow_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing by looking at every row; of equally full rows the one opened or filled last."""
    rows: list[list[int]] = []
    rooms: list[int] = []
    touched: list[int] = []
    clock = itertools.count()
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        fitting = [r for r, room in enumerate(rooms) if room >= lengths[number]]
        row = min(fitting, key=lambda r: (rooms[r], -touched[r]), default=len(rows))
        if row == len(rows):
            rows.append([])
            rooms.append(capacity)
            touched.append(0)
        rows[row].append(number)
        rooms[row] -= lengths[number]
        touched[row] = next(clock)
    return rows


def first_fit(lengths: list[int], capacity: int) -> int:
    rooms: list[int] = []
    for length in lengths:
        row = next((r for r, room in enumerate(rooms) if room >= length), len(rooms))
        if row == len(rooms):
            rooms.append(capacity)
        rooms[row] -= length
    return len(rooms)


def fewest(lengths: list[int], capacity: int) -> int:
    """The fewest rows, by trying: the longest sample left goes into each row it fits, or into a new one."""
    ordered, best = sorted(lengths, reverse=True), len(lengths)

    def place(n: int, rooms: tuple[int, ...]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if n == len(ordered):
            best = len(rooms)
            return
        for room in set(rooms):
            if room >= ordered[n]:
                r = rooms.index(room)
                place(n + 1, (*rooms[:r], room - ordered[n], *rooms[r + 1 :]))
        place(n + 1, (*rooms, capacity - ordered[n]))

    place(0, ())
    return best


@given(LENGTHS, st.integers(40, 120))
def test_rows_are_those_of_a_slow_best_fit(lengths: list[int], capacity: int) -> None:
    rows = pack(lengths, capacity)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    assert all(sum(lengths[n] for n in row) <= capacity for row in rows)
    assert rows == slow_best_fit(lengths, capacity) == pack(np.array(lengths), capacity)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
@settings(deadline=None)
def test_close_to_the_fewest_rows(lengths: list[int]) -> None:
    assert fewest(lengths, 40) <= len(pack(lengths, 40)) <= 11 / 9 * fewest(lengths, 40) + 2 / 3


@pytest.mark.parametrize("seed", range(5))
def test_three_percent_are_left_free_on_a_realistic_mix(seed: int) -> None:
    lengths = realistic(5000, seed)
    rows = pack(lengths, ROW)
    free, padded = unfilled_share(lengths, rows, ROW), padded_share(lengths, 8)
    assert len(rows) <= first_fit(lengths.tolist(), ROW)
    assert 0 <= free <= 0.03 and padded > 0.4
    assert free == pytest.approx(sum(ROW - lengths[row].sum() for row in rows) / (ROW * len(rows)))


def test_shares_by_hand() -> None:
    assert unfilled_share([3, 4, 5], [[2], [0, 1]], 8) == 1 - 12 / 16
    assert padded_share([3, 4, 5], 2) == pytest.approx(1 - 12 / (8 + 5))
    assert pack([], 8) == [] and pack([8, 8], 8) == [[0], [1]]


@pytest.mark.parametrize("lengths", [[9], [4, 0]])
def test_samples_that_no_row_takes(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="rows of 8"):
        pack(lengths, 8)


SHAPE = ModelShape(layers=2, hidden=48, ffn=80, heads=4, kv_heads=2, head_dim=12, vocab=97, tied=True, max_positions=64)


def sample(length: int, seed: int) -> ChatSample:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SHAPE.vocab, (length + 1,), generator=generator)
    weights = (torch.rand(length, generator=generator) < 0.5).float()
    weights[-1] = 1
    return ChatSample(tokens, weights)


def loss_and_gradients(model: Decoder, batches: list[list[ChatSample]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Summed over `batches`, each one forward and backward pass."""
    model.zero_grad()
    total = 0.0
    for samples in batches:
        batch = packed_batch(samples)
        loss, _ = model.loss(batch, batch.weights_T)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lengths", [(1, 7, 3, 12, 30), (5, 5), (40, 1)])
def test_a_packed_batch_equals_its_samples_one_by_one(lengths: tuple[int, ...]) -> None:
    samples = [sample(length, seed) for seed, length in enumerate(lengths)]
    model = Decoder(SHAPE, load_recipe("fp32"))
    model.initialise(0.2, seed=1)
    packed, gradients = loss_and_gradients(model, [samples])
    single, expected = loss_and_gradients(model, [[s] for s in samples])
    assert packed == pytest.approx(single, rel=1e-5)
    assert gradients.keys() == expected.keys() and gradients
    for name, gradient in gradients.items():
        difference = torch.linalg.norm(gradient - expected[name])
        assert difference <= 1e-5 * torch.linalg.norm(expected[name]), name


def test_a_packed_batch_is_flat() -> None:
    samples = [sample(3, 0), sample(5, 1)]
    batch = packed_batch(samples)
    assert batch.lengths == (3, 5) and batch.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.targets_T.tolist() == [*samples[0].tokens[1:].tolist(), *samples[1].tokens[1:].tolist()]
    assert batch.tokens_T.tolist() == [*samples[0].tokens[:-1].tolist(), *samples[1].tokens[:-1].tolist()]
    assert batch.weights_T.dtype == torch.float32
    assert batch.weights_T.tolist() == [*samples[0].weights.tolist(), *samples[1].weights.tolist()]
