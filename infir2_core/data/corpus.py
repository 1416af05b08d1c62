"""A blend of Megatron corpora as training sequences, always in the same order.

`open_corpus` is a thin layer over megatron-core's own datasets: documents are split into train, validation and test in
the order they are stored, concatenated in an order drawn from the seed, cut every `seq_len` tokens (a sequence carries
one more, the last target) and shuffled. Training sample i depends on the corpora, weights, split, seed, seq_len and,
once more than one epoch is drawn, on the number of samples: never on the process, the rank or a restart. Validation
has an order of its own, the same for every seed, so that runs of different seeds are judged on the same text. Batching
and the data-parallel share are not decided here.

The order's index files are content-addressed below `cache_dir`, built aside by rank 0 and renamed; all ranks must see
that folder. The corpora themselves are found and checked by prefixes.py.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infir2_core.data.prefixes import Index, check_prefixes, describe_prefix, expand_blend, expand_prefixes, read_index
from infir2_core.errors import InputError

__all__ = ["Corpus", "Samples", "check_prefixes", "describe_prefix", "expand_blend", "expand_prefixes", "open_corpus"]


VALIDATION_SEED = 1234  # any constant will do: it only has to be the same for all runs
BUILDING = ".building-"  # begins the names of folders that are not whole yet
SETTLED = 60  # seconds after which such a folder has its lock, if anybody builds it


class Samples:
    """Training sequences: `len()` of them, each a NumPy int64 array of seq_len + 1 token ids."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        sample = self._dataset[i]
        # Megatron hands out inputs and targets, which overlap in all but one token.
        return np.append(sample["tokens"].numpy(), sample["labels"][-1].numpy())


@dataclass(frozen=True)
class Corpus:
    """What a run trains and validates on; `valid` is None when its share of the split, or its sample count, is 0."""

    train: Samples
    valid: Samples | None


@contextmanager
def quiet_megatron() -> Iterator[None]:
    """Keep megatron-core's import warnings and log lines off the terminal; its errors still pass."""
    logger = logging.getLogger("megatron")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def open_corpus(
    blend: list[tuple[float, str]],
    split: str,
    seq_len: int,
    seed: int,
    train_samples: int,
    valid_samples: int,
    cache_dir: Path,
) -> Corpus:
    """Open a blend for a run. In an initialised torch.distributed group every rank calls this; rank 0 builds the order.

    Args:
        blend: (weight, prefix) pairs; weights are normalised. Every prefix contributes its own share to each split.
        split: shares of documents for train, validation and test, such as "90,5,5", in stored order.
        seq_len: tokens in a sequence; a sample holds one more.
        seed: draws the order of training.
        train_samples: sequences the run will read; data is repeated, reshuffled, when that is more than there is.
        valid_samples: sequences one validation reads; 0 for none.
        cache_dir: folder for the order's index files, shared by all ranks.

    Returns:
        Corpus whose `train` has at least `train_samples` sequences and whose `valid` at least `valid_samples`.

    Raises:
        InputError: as `read_index`; a split holds less than one sequence; the cache cannot be written.
    """
    with quiet_megatron():
        return _open(blend, split, seq_len, seed, train_samples, valid_samples, cache_dir)


def _open(
    blend: list[tuple[float, str]],
    split: str,
    seq_len: int,
    seed: int,
    train_samples: int,
    valid_samples: int,
    cache_dir: Path,
) -> Corpus:
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    indexes = [read_index(prefix) for _, prefix in blend]
    total = sum(weight for weight, _ in blend)
    weights = [weight / total for weight, _ in blend]
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=([prefix for _, prefix in blend], weights),
        split=split,
        tokenizer=_Ids(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    wanted = {Split.train: train_samples, Split.valid: valid_samples}
    spans = {part: config.split_matrix[part.value] for part, samples in wanted.items() if samples > 0}
    for part, span in spans.items():
        for index in indexes:
            if span is not None:
                _check_split(index, part.name, span, split, seq_len)
    # The order depends on the lengths of the sequences alone, so they and the settings name its cache.
    digests = [hashlib.sha256(index.lengths_N.tobytes()).hexdigest() for index in indexes]
    named = [digests, weights, split, seq_len, seed, train_samples, valid_samples]
    cache = cache_dir / hashlib.sha256(json.dumps(named).encode()).hexdigest()[:24]

    def build(folder: Path) -> dict[Any, Any]:
        config.path_to_cache = str(folder)
        return {
            part: _build(part, span, wanted[part], indexes, digests, weights, config)
            for part, span in spans.items()
            if span
        }

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        if not cache.is_dir() and (not distributed or torch.distributed.get_rank() == 0):
            build_aside(cache, build)
    finally:
        if distributed:
            torch.distributed.barrier()
    if not cache.is_dir():
        raise InputError(
            "rank 0 could not write the data order here, or this rank cannot see it",
            str(cache),
            "use a folder all ranks share",
        )
    built = build(cache)
    if Split.train not in built:
        raise InputError(
            "the split leaves nothing to train on",
            f"split {split}",
            "give the train share, the one in front, more than 0",
        )
    return Corpus(Samples(built[Split.train]), Samples(built[Split.valid]) if Split.valid in built else None)


def build_aside(cache: Path, build: Callable[[Path], object]) -> None:
    """Have `build` fill a folder beside `cache`, and rename it to that when it is whole and on the disk.

    Raises:
        InputError: the folder cannot be written.
        OSError: the disk is full or failing; names the place.
    """
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        _sweep(cache.parent)
        aside = Path(tempfile.mkdtemp(prefix=BUILDING, dir=cache.parent))
    except OSError as error:
        raise InputError(f"cannot write here: {error.strerror}", str(cache.parent), "choose a folder you own") from None
    held = os.open(aside, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)
        build(aside)
        for path in (*aside.rglob("*"), aside):
            _sync(path)
        aside.chmod(0o755)
        os.rename(aside, cache)
        _sync(cache.parent)
    except OSError as error:
        if not cache.is_dir():  # a run beside this one may have been faster; its files are the same
            error.filename = error.filename or str(cache.parent)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(held)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Removes what killed builds left in `folder`: nobody holds its lock, which is taken right after it is made."""
    for left in folder.glob(f"{BUILDING}*"):
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY)
            try:
                if time.time() - left.stat().st_mtime > SETTLED:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


def _build(
    part: Any,
    span: tuple[float, float],
    samples: int,
    indexes: list[Index],
    digests: list[str],
    weights: list[float],
    config: Any,
) -> Any:
    """One split of the blend: megatron-core's GPTDataset for each corpus and, over several, its BlendedDataset.

    The builder class of megatron-core does the same, but fails on a blend outside a process group, and always builds
    the test split, which loops for ever when that has no document.
    """
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    if part is Split.valid:
        config = copy.copy(config)
        config.random_seed = VALIDATION_SEED
    datasets = []
    for index, digest, weight in zip(indexes, digests, weights, strict=True):
        begin, end = _documents(index, span)
        # The blend always takes from the corpus furthest behind its share, so none is ever ahead by more than one.
        count = samples if len(indexes) == 1 else int(np.ceil(samples * weight)) + 1
        documents = np.arange(begin, end, dtype=np.int32)
        # The digest stands for the path, which Megatron only uses to name cache files: a corpus may move.
        datasets.append(GPTDataset(IndexedDataset(index.prefix), digest, documents, count, part, config))
    if len(datasets) == 1:
        return datasets[0]
    uncached = copy.copy(config)  # blending is quick, and the cached form needs a process group
    uncached.path_to_cache = None
    return BlendedDataset(datasets, weights, samples, uncached)


def _documents(index: Index, span: tuple[float, float]) -> tuple[int, int]:
    """Megatron's rounding of a split's shares to sequences [begin, end)."""
    return round(span[0] * len(index.lengths_N)), round(span[1] * len(index.lengths_N))


def _check_split(index: Index, name: str, span: tuple[float, float], split: str, seq_len: int) -> None:
    begin, end = _documents(index, span)
    tokens = int(index.lengths_N[begin:end].sum(dtype=np.int64))
    if tokens < seq_len + 1:
        title = {"train": "training", "valid": "validation"}[name]
        raise InputError(
            f"the {title} split has {tokens:,} tokens in {end - begin:,} documents, a sequence needs {seq_len + 1:,}",
            f"{index.prefix}, split {split}",
            "give it a larger share (--split), shorter sequences (--seq-len) or more data",
        )


class _Ids:
    """Stands in for a tokenizer where Megatron asks for one: the corpus holds ids already, and none is padding."""

    vocab_size = None
    pad, eod = -1, -2
    unique_identifiers: dict[str, str] = {}
