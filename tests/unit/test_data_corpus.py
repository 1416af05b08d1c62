"""The training order: what a sample holds, that it never changes, and what a corpus too small to split says."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infir2_core.data import corpus as module
from infir2_core.data.corpus import Samples, open_corpus
from infir2_core.errors import InputError

with module.quiet_megatron():
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

SEQ = 16


def write(prefix: Path, lengths: list[int], start: int = 0) -> str:
    """A corpus in which token k of the whole file has id start + k, so a sample tells where it came from."""
    builder, token = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32), start
    for length in lengths:
        builder.add_document(np.arange(token, token + length), [length])
        token += length
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


LENGTHS = np.random.default_rng(0).integers(1, 60, 200).tolist()
BORDERS = np.cumsum([0, *LENGTHS])
TRAIN_END, VALID_END = int(BORDERS[180]), int(BORDERS[190])  # 90 % and 95 % of 200 documents


def take(samples: Samples, count: int | None = None) -> np.ndarray:
    return np.stack([samples[i] for i in range(len(samples) if count is None else count)])


def test_one_epoch_reads_every_training_token_once_and_no_other(tmp_path: Path) -> None:
    corpus = open_corpus([(1.0, write(tmp_path / "c", LENGTHS))], "90,5,5", SEQ, 3, 10, 2, tmp_path / "cache")
    samples = take(corpus.train)
    assert samples.dtype == np.int64 and samples.shape[1] == SEQ + 1
    inputs = samples[:, :-1].ravel()
    assert len(set(inputs.tolist())) == len(inputs) and inputs.max() < TRAIN_END
    assert len(inputs) > TRAIN_END - SEQ - 2  # all but the last incomplete sequence
    # Inside a document the next target is the next token of the file; a jump happens only at the end of a document.
    ends = set((BORDERS[1:] - 1).tolist())
    jumps = samples[:, :-1][np.diff(samples, axis=1) != 1]
    assert set(jumps.tolist()) <= ends
    assert corpus.valid is not None
    held_out = take(corpus.valid)
    assert held_out.min() >= TRAIN_END and held_out.max() < VALID_END


def test_order_is_megatrons_own(tmp_path: Path) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    prefix = write(tmp_path / "c", LENGTHS)

    def megatrons(seed: int) -> Any:
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=SEQ,
            blend=([prefix], None),
            split="90,5,5",
            path_to_cache=str(tmp_path / "theirs"),
            tokenizer=module._Ids(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        return BlendedMegatronDatasetBuilder(GPTDataset, [700, 20, 0], lambda: True, config).build()

    ours = open_corpus([(1.0, prefix)], "90,5,5", SEQ, 5, 700, 20, tmp_path / "cache")
    assert ours.valid is not None
    for mine, theirs in (
        (ours.train, megatrons(5)[0]),
        (ours.valid, megatrons(module.VALIDATION_SEED)[1]),
    ):
        assert len(mine) == len(theirs)
        for i in range(len(mine)):
            np.testing.assert_array_equal(mine[i][:-1], theirs[i]["tokens"])
            np.testing.assert_array_equal(mine[i][1:], theirs[i]["labels"])


def test_seed_draws_the_order_and_the_sample_count_does_not_within_an_epoch(tmp_path: Path) -> None:
    blend = [(1.0, write(tmp_path / "c", LENGTHS))]

    def order(seed: int, samples: int) -> np.ndarray:
        return take(open_corpus(blend, "90,5,5", SEQ, seed, samples, 0, tmp_path / "cache").train, 100)

    np.testing.assert_array_equal(order(0, 100), order(0, 200))
    assert (order(0, 100) != order(1, 100)).any()


def test_runs_of_different_seeds_are_judged_on_the_same_text(tmp_path: Path) -> None:
    blend = [(0.5, write(tmp_path / "a", LENGTHS)), (0.5, write(tmp_path / "b", LENGTHS, 10_000))]

    def held_out(seed: int) -> np.ndarray:
        valid = open_corpus(blend, "90,5,5", SEQ, seed, 100, 8, tmp_path / "cache").valid
        assert valid is not None
        return take(valid, 8)

    np.testing.assert_array_equal(held_out(0), held_out(1))


def test_more_samples_than_data_repeat_it(tmp_path: Path) -> None:
    train = open_corpus([(1.0, write(tmp_path / "c", LENGTHS))], "1,0,0", SEQ, 0, 1000, 0, tmp_path / "cache").train
    counts = np.bincount(take(train)[:, :-1].ravel(), minlength=sum(LENGTHS))
    assert len(train) >= 1000 and counts.min() >= 2 and counts.max() - counts.min() <= 1


def test_blend_keeps_its_shares_at_every_moment(tmp_path: Path) -> None:
    starts = (0, 100_000, 200_000)
    weights = (0.7, 0.2, 0.1)
    blend = [(10 * w, write(tmp_path / f"c{s}", LENGTHS, s)) for w, s in zip(weights, starts, strict=True)]
    corpus = open_corpus(blend, "90,5,5", SEQ, 0, 500, 50, tmp_path / "cache")
    assert corpus.valid is not None and len(corpus.valid) == 50
    samples = take(corpus.train)
    assert len(samples) == 500
    origin = samples[:, 0] // 100_000
    assert (samples // 100_000 == origin[:, None]).all()  # a sequence never mixes corpora
    for which, weight in enumerate(weights):
        seen = np.cumsum(origin == which)
        assert np.abs(seen - weight * np.arange(1, 501)).max() <= 1


def test_blend_of_very_small_shares_does_not_run_dry(tmp_path: Path) -> None:
    blend = [(w, write(tmp_path / f"c{n}", [SEQ + 1] * 40, 1000 * n)) for n, w in enumerate((0.97, 0.01, 0.02))]
    for samples in (1, 2, 3, 7, 36, 37, 400):
        corpus = open_corpus(blend, "1,0,0", SEQ, 0, samples, 0, tmp_path / "cache")
        assert len(take(corpus.train)) == samples


SCRIPT = """
import sys, hashlib, json
from pathlib import Path
prefix, cache, rank, world, store = sys.argv[1:]
if int(world) > 1:
    import torch
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=int(world))
from infir2_core.data.corpus import open_corpus
for blend in ([(1.0, prefix)], [(1.0, prefix), (2.0, prefix + "2")]):
    c = open_corpus(blend, "90,5,5", 16, 7, 300, 20, Path(cache))
    d = hashlib.sha256()
    for part in (c.train, c.valid):
        for i in range(len(part)):
            d.update(part[i].tobytes())
    print(d.hexdigest())
if int(world) > 1:
    torch.distributed.destroy_process_group()
"""


def test_same_order_in_every_process_rank_and_restart_and_nothing_printed(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", LENGTHS)
    write(tmp_path / "c2", LENGTHS, 100_000)
    (tmp_path / "s.py").write_text(SCRIPT)

    def start(cache: str, rank: int = 0, world: int = 1) -> subprocess.Popen[str]:
        arguments = [prefix, tmp_path / cache, rank, world, tmp_path / "store"]
        command = [sys.executable, tmp_path / "s.py", *arguments]
        return subprocess.Popen([*map(str, command)], stdout=-1, stderr=-1, text=True)

    outputs = [start("shared", rank, 2).communicate for rank in range(2)]
    results = [wait() for wait in outputs]
    results.append(start("alone").communicate())
    expected = ""
    for blend in ([(1.0, prefix)], [(1.0, prefix), (2.0, f"{prefix}2")]):
        corpus = open_corpus(blend, "90,5,5", SEQ, 7, 300, 20, tmp_path / "shared")
        digest = hashlib.sha256()
        for part in (corpus.train, corpus.valid):
            assert part is not None
            digest.update(take(part).tobytes())
        expected += digest.hexdigest() + "\n"
    assert results == [(expected, "")] * 3


def test_a_killed_build_leaves_nothing_that_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blend = [(1.0, write(tmp_path / "c", LENGTHS))]
    cache = tmp_path / "cache"
    real = np.save
    calls = []

    def killed(path: object, *args: object, **kwargs: object) -> None:
        real(path, *args, **kwargs)  # type: ignore[arg-type]
        calls.append(path)
        if len(calls) == 2:
            Path(str(path)).write_bytes(b"half")
            os.rename(Path(str(path)).parent, cache / ".building-killed")  # what a kill leaves behind
            raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        open_corpus(blend, "90,5,5", SEQ, 0, 50, 5, cache)
    monkeypatch.undo()
    corpus = open_corpus(blend, "90,5,5", SEQ, 0, 50, 5, cache)
    np.testing.assert_array_equal(
        take(corpus.train), take(open_corpus(blend, "90,5,5", SEQ, 0, 50, 5, tmp_path / "new").train)
    )


def test_cache_follows_the_data_not_its_path(tmp_path: Path) -> None:
    first = open_corpus([(1.0, write(tmp_path / "c", LENGTHS))], "90,5,5", SEQ, 0, 50, 5, tmp_path / "cache")
    write(tmp_path / "c", LENGTHS[::-1])  # another corpus under the same name
    second = open_corpus([(1.0, str(tmp_path / "c"))], "90,5,5", SEQ, 0, 50, 5, tmp_path / "cache")
    fresh = open_corpus([(1.0, str(tmp_path / "c"))], "90,5,5", SEQ, 0, 50, 5, tmp_path / "other")
    np.testing.assert_array_equal(take(second.train), take(fresh.train))
    write(tmp_path / "moved", LENGTHS)
    entries = sorted((tmp_path / "cache").iterdir())
    moved = open_corpus([(1.0, str(tmp_path / "moved"))], "90,5,5", SEQ, 0, 50, 5, tmp_path / "cache")
    assert sorted((tmp_path / "cache").iterdir()) == entries  # found, not built again
    assert len(moved.train) == len(first.train)


@pytest.mark.parametrize(("split", "valid_samples"), [("1,0,0", 20), ("95,0,5", 20), ("90,5,5", 0)])
def test_no_validation(tmp_path: Path, split: str, valid_samples: int) -> None:
    blend = [(1.0, write(tmp_path / "c", LENGTHS))]
    assert open_corpus(blend, split, SEQ, 0, 50, valid_samples, tmp_path / "cache").valid is None


@pytest.mark.parametrize(
    ("lengths", "split", "message"),
    [
        ([40] * 10, "99,1,0", "validation split has 0 tokens in 0 documents, a sequence needs 17"),
        ([40] * 19 + [16], "95,5,0", "validation split has 16 tokens in 1 documents, a sequence needs 17"),
        ([16, 400], "50,50,0", "training split has 16 tokens"),
        ([40] * 10, "0,100,0", "leaves nothing to train on"),
    ],
)
def test_splits_too_small_for_one_sequence(tmp_path: Path, lengths: list[int], split: str, message: str) -> None:
    prefix = write(tmp_path / "c", lengths)
    with pytest.raises(InputError, match=message) as error:
        open_corpus([(1.0, prefix)], split, SEQ, 0, 50, 5, tmp_path / "cache")
    assert split in error.value.where and error.value.hint


def test_an_empty_test_split_is_no_problem(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", [40] * 10)  # 1 % of ten documents is none
    assert len(open_corpus([(1.0, prefix)], "79,20,1", SEQ, 0, 5, 2, tmp_path / "cache").train) >= 5


def test_samples_out_of_range(tmp_path: Path) -> None:
    train = open_corpus([(1.0, write(tmp_path / "c", LENGTHS))], "1,0,0", SEQ, 0, 5, 0, tmp_path / "cache").train
    for i in (-1, len(train)):
        with pytest.raises(IndexError):
            train[i]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write here"):
        open_corpus([(1.0, write(tmp_path / "c", LENGTHS))], "1,0,0", SEQ, 0, 5, 0, tmp_path / "file" / "cache")


def test_two_byte_ids_up_to_the_largest(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.uint16)
    builder.add_document(np.full(SEQ + 1, 65498, np.uint16), [SEQ + 1])
    builder.finalize(str(tmp_path / "c.idx"))
    sample = open_corpus([(1.0, str(tmp_path / "c"))], "1,0,0", SEQ, 0, 1, 0, tmp_path / "cache").train[0]
    assert sample.tolist() == [65498] * (SEQ + 1)
