"""Conversations as microbatches: shuffled anew in each epoch, split over the ranks by length, packed by token budget.

The samples of all epochs make one long row, from which each step takes the next `global_batch`: a batch may begin in
one epoch and end in the next, and only the last one of the run may be smaller. So every sample is trained on exactly
`epochs` times. Within a step, samples go longest first to the rank with the fewest tokens, and each rank packs its own
into as few microbatches of `row_tokens` as best-fit finds; ranks may have different numbers of them. Microbatches hold
no padding but what fills them up to one of few sizes (`size_of`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..config.resolve_sft import CACHE
from ..config.schema import ALIGNMENT, RunConfig
from ..data.batch import Batch, filled
from ..data.chat_measure import content, open_whole
from ..data.chat_set import ChatSet, epoch_order
from ..data.packing import pack, packed_batch
from ..engines.ranks import Ranks
from ..errors import InputError
from .feed import Share

SIZES = 64  # of microbatches, at most about so many


class ChatFeed:
    """The chat set of a run of fine-tuning."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        assert config.sft is not None
        self.sft, self.ranks = config.sft, ranks
        self.train_samples = 0  # no sample's place depends on how many are drawn
        self.order = [config.data[0].content, self.sft.seed, self.sft.eval_share]
        data, sft = config.data[0], self.sft
        whole = open_whole(Path(data.prefix), config.tokenizer, sft, Path(config.runs) / CACHE)
        if content(whole) != data.content:
            what = "the chats, their tokenizer or its template are not those that the run began with"
            raise InputError(what, data.prefix, "bring the earlier ones back, or start again with --new")
        self.chats, self.held = whole.split(sft.eval_share, sft.seed)
        self.lengths = self.chats.lengths  # of all samples: made anew each time it is asked for
        self._orders = lru_cache(maxsize=2)(lambda epoch: epoch_order(len(self.chats), self.sft.seed, epoch))

    def step(self, samples: int) -> Share:
        stop = min(samples + self.sft.global_batch, self.sft.epochs * len(self.chats))
        chosen = [int(self._orders(i // len(self.chats))[i % len(self.chats)]) for i in range(samples, stop)]
        lengths = self.lengths[chosen]
        shares = [self._rows(lengths, part) for part in split(lengths, self.ranks.world)]
        tokens = int(lengths.sum())
        sizes = [int(lengths[row].sum()) for rows in shares for row in rows]
        batches = [self._batch(self.chats, [chosen[i] for i in row]) for row in shares[self.ranks.rank]]
        context = float((lengths**2).sum() / tokens)
        filler = sum(size_of(size, self.sft.row_tokens) - size for size in sizes)
        return Share(batches, len(chosen), tokens, filler, context)

    def held_out(self) -> Iterator[Batch] | None:
        if not len(self.held) or not self.sft.eval_every:
            return None
        lengths = self.held.lengths
        mine = split(lengths, self.ranks.world)[self.ranks.rank]
        return (self._batch(self.held, row) for row in self._rows(lengths, mine))

    def prompts(self, count: int) -> list[list[int]]:
        """Ids of the first `count` held-out conversations up to the first token that is trained."""
        found = []
        for i in range(min(count, len(self.held))):
            sample = self.held.sample(i)
            first = int(sample.weights.nonzero()[0])  # of the targets, which are one token ahead
            found.append(sample.tokens[: first + 1].tolist())
        return found

    def _rows(self, lengths: np.ndarray, samples: Sequence[int]) -> list[list[int]]:
        """The samples in groups of at most `row_tokens`; `lengths` are those of all that `samples` count."""
        packed = pack(lengths[list(samples)], self.sft.row_tokens)
        return [[samples[i] for i in row] for row in packed]

    def _batch(self, chats: ChatSet, row: Sequence[int]) -> Batch:
        batch = packed_batch([chats.sample(i) for i in row])
        return filled(batch, size_of(len(batch.tokens_T), self.sft.row_tokens))


def size_of(tokens: int, row_tokens: int) -> int:
    """Tokens that a microbatch of `tokens` is filled up to: the next 64th of `row_tokens`, in blocks of `ALIGNMENT`.

    Few sizes recur, so that what is compiled, chosen or allocated for a shape is found again.
    """
    unit = max(1, row_tokens // SIZES // ALIGNMENT) * ALIGNMENT
    return min(-(-tokens // unit) * unit, row_tokens)


def split(lengths: np.ndarray, parts: int) -> list[list[int]]:
    """Indices of `lengths` in `parts` groups of about the same sum: the longest first, each to the smallest group."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for i in np.argsort(-lengths, kind="stable").tolist():
        least = sums.index(min(sums))
        groups[least].append(i)
        sums[least] += int(lengths[i])
    return groups
