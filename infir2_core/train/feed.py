"""What the loop trains on, whatever the stage: microbatches of an optimizer step, held-out batches, and their order.

    CorpusFeed    continual pre-training: rows of equal length from a corpus
    ChatFeed      fine-tuning (chat_feed.py): conversations of any length, packed

A feed is a pure function of the position, so that a resumed run sees what an uninterrupted one would have seen. Every
rank builds its own share; the figures of a step cover all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..config.schema import CptSettings, RunConfig
from ..data.batch import Batch, rows_to_batch
from ..data.corpus import open_corpus
from ..engines.ranks import Ranks


@dataclass
class Position:
    """Where a run stands. Samples count sequences of the training set, `tokens` those that went through the model."""

    step: int = 0
    samples: int = 0
    train_samples: int = 0
    tokens: int = 0
    skips: int = 0

    def state(self) -> dict[str, int]:
        return self.__dict__.copy()


@dataclass
class Share:
    """The data of one optimizer step.

    Attributes:
        batches: this rank's microbatches; none where a rank has nothing left to do.
        samples: sequences, of all ranks.
        tokens: of all ranks, fillers not counted.
        filler: tokens that only fill microbatches up to whole blocks, of all ranks.
        context: mean length of the sequence that a token is in.
    """

    batches: list[Batch]
    samples: int
    tokens: int
    filler: int
    context: float


class Feed(Protocol):
    """The data of a run."""

    train_samples: int  # what `Position.train_samples` is to be

    def step(self, samples: int) -> Share:
        """The optimizer step that begins after `samples` sequences."""

    def held_out(self) -> Iterable[Batch] | None:
        """This rank's microbatches of one validation; None when nothing is held out."""

    @property
    def order(self) -> list[Any]:
        """What decides which sample is the n-th, as JSON."""


def corpus_order(config: RunConfig, cpt: CptSettings) -> list[Any]:
    """`Feed.order` of continual pre-training, known before the corpora are opened."""
    return [[[b.content, b.weight] for b in config.data], cpt.seq_len, cpt.seed, cpt.split]


class CorpusFeed:
    """Rows of the blended corpora, `global_batch` of them a step, dealt to the ranks in order."""

    def __init__(self, config: RunConfig, ranks: Ranks, position: Position) -> None:
        assert config.cpt is not None
        self.cpt, self.ranks, self.order = config.cpt, ranks, corpus_order(config, config.cpt)
        cpt = self.cpt
        left = (cpt.steps - position.step) * cpt.global_batch
        # The order of samples depends on how many were asked for, so a decay run asks for what its parent asked for.
        self.train_samples = max(position.train_samples, position.samples + left)
        blend = [(blend.weight, blend.prefix) for blend in config.data]
        cache = Path(config.runs) / ".index-cache"
        needed = cpt.eval_iters * cpt.global_batch if cpt.eval_every else 0
        self.corpus = open_corpus(blend, cpt.split, cpt.seq_len, cpt.seed, self.train_samples, needed, cache)

    def step(self, samples: int) -> Share:
        cpt = self.cpt
        batches = self._microbatches(self.corpus.train.__getitem__, samples)
        return Share(batches, cpt.global_batch, cpt.global_batch * cpt.seq_len, 0, cpt.seq_len)

    def held_out(self) -> list[Batch] | None:
        valid, cpt = self.corpus.valid, self.cpt
        if valid is None or not cpt.eval_every:
            return None
        batches: list[Batch] = []
        for i in range(cpt.eval_iters):
            batches += self._microbatches(lambda index: valid[index % len(valid)], i * cpt.global_batch)
        return batches

    def _microbatches(self, rows: Callable[[int], Any], start: int) -> list[Batch]:
        """This rank's share of the global batch that begins at sample `start`."""
        cpt = self.cpt
        share = cpt.global_batch // self.ranks.world
        first = start + self.ranks.rank * share
        made = []
        for begin in range(first, first + share, cpt.micro_batch):
            made.append(rows_to_batch([torch.from_numpy(rows(i)) for i in range(begin, begin + cpt.micro_batch)]))
        return made


def open_feed(config: RunConfig, ranks: Ranks, position: Position) -> Feed:
    """The data of a run that stands at `position`."""
    if config.stage == "cpt":
        return CorpusFeed(config, ranks, position)
    from .chat_feed import ChatFeed

    return ChatFeed(config, ranks)
