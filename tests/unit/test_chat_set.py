"""Chat sets: what is stored is what the tokenizer gave, troubles are counted and named, splits and orders repeat."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_chat_source import ANSWER, SAID, USER, jsonl
from tiny_bpe import train_bpe

from infir2_core.data import chat_set
from infir2_core.data.byte_files import BYTE_TEMPLATE
from infir2_core.data.chat_set import ChatSet, epoch_order, open_chat
from infir2_core.data.chat_template import load_chat_tokenizer
from infir2_core.errors import InputError


def samples(count: int, **extra: Any) -> list[dict[str, Any]]:
    answers = [{"role": "assistant", "content": f"{n} " * (1 + n % 7)} for n in range(count)]
    return [{"messages": [{"role": "user", "content": f"é {n}"}, a], **extra} for n, a in enumerate(answers)]


def long_samples(count: int) -> list[dict[str, Any]]:
    return [{"messages": [USER, {"role": "assistant", "content": f"{n} " * 200}]} for n in range(1000, 1000 + count)]


def opened(path: Path, **options: Any) -> ChatSet:
    settings = {"tokenizer_ref": "byte", "max_tokens": 256, "too_long": "drop", "cache": path.parent / "cache"}
    return open_chat(path, **(settings | options))


def test_samples_are_what_the_tokenizer_gives(tmp_path: Path) -> None:
    records = samples(150)
    data, seen = opened(jsonl(tmp_path / "a.jsonl", *records), progress=(calls := []).append), 0
    chat = load_chat_tokenizer("byte")
    assert len(data) == 150 and calls[-1] == 150 and len(calls) > 2
    for n, record in enumerate(records):
        ids, mask = chat.encode_chat(record["messages"])
        sample = data.sample(n)
        assert (sample.tokens.dtype, sample.weights.dtype) == (torch.int64, torch.float32)
        assert sample.tokens.tolist() == ids.tolist() and sample.weights.tolist() == mask[1:].tolist()
        assert data.lengths[n] == len(ids) - 1
        seen += int(mask[1:].sum())
    assert data.trained_tokens == data.report.trained_tokens == seen
    assert data.report.prompt_tokens == int(data.lengths.sum()) + 150 - seen
    with pytest.raises(IndexError):
        data.sample(150)


def test_the_cache_follows_content_tokenizer_template_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", *samples(9))
    first = opened(path)
    folders = {train_bpe(tmp_path / name, chat_template=BYTE_TEMPLATE + name.strip("bpe")) for name in ("bpe", "bpe ")}
    others = [opened(path, tokenizer_ref=str(folder)) for folder in folders]
    others += [opened(path, max_tokens=255), opened(path, too_long="truncate")]
    others.append(opened(jsonl(tmp_path / "b" / "a.jsonl", *samples(10)), cache=tmp_path / "cache"))
    assert len({first.digest, *(other.digest for other in others)}) == 6
    monkeypatch.setattr(chat_set, "read_chat", lambda files: pytest.fail("it was read again"))
    moved = path.rename(tmp_path / "renamed.jsonl")
    again = opened(moved)
    assert again.digest == first.digest and list(again.report.layouts) == ["renamed.jsonl"]
    assert not list((tmp_path / "cache").glob(".building*"))


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "a.jsonl", *samples(99))
    calls = iter([None])

    def stop(count: int) -> None:
        next(calls)  # the second call raises StopIteration

    with pytest.raises(StopIteration):
        opened(path, progress=stop)
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["files"]
    assert len(opened(path)) == 99


def test_tokenising_holds_little_at_a_time(tmp_path: Path) -> None:
    """What is in memory does not grow with the data: ten times the samples, the same peak."""
    peaks = []
    for count in (1, 24, 240):  # the first loads what is loaded once
        path = jsonl(tmp_path / f"{count}.jsonl", *({"id": n, **s} for n, s in enumerate(long_samples(count))))
        tracemalloc.start()
        assert len(opened(path, max_tokens=4000)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 4 * peaks[1], "64 samples at a time, not 240"


def test_what_a_kill_left_is_removed_and_what_is_being_built_is_not(tmp_path: Path) -> None:
    cache, long_ago = tmp_path / "cache", time.time() - 3600
    left, living, fresh = (cache / f".building-{name}" for name in ("left", "living", "fresh"))
    for folder in (left, living, fresh):
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(b"1234")
    for folder in (left, living):
        os.utime(folder, (long_ago, long_ago))
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    opened(jsonl(tmp_path / "a.jsonl", *samples(3)))
    assert not left.exists() and living.is_dir() and fresh.is_dir()
    os.close(held)


def test_a_full_disk_is_said_with_its_place_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "a.jsonl", *samples(3))
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(OSError) as info:
            opened(path)
    assert info.value.filename == str(tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["files"]
    assert len(opened(path)) == 3


@pytest.mark.parametrize("name", ["tokens.bin", "mask.bin", "index.npz", "report.json", "sums.json"])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "other", "{}", "["])
def test_a_damaged_set_is_made_again(tmp_path: Path, name: str, damage: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", *samples(5))
    first = opened(path)
    last = first.sample(4)
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    whole = file.read_bytes()
    damaged = {"empty": b"", "cut": whole[: len(whole) // 2], "other": bytes(len(whole)), "[": b"[" * 100_000}
    file.unlink() if damage == "gone" else file.write_bytes(damaged.get(damage, damage.encode()))
    again = opened(path)
    assert again.digest == first.digest and again.report == first.report
    assert (again.sample(4).tokens == last.tokens).all() and (again.sample(4).weights == last.weights).all()
    if name not in ("index.npz", "sums.json"):  # a zip file has times in it
        assert file.read_bytes() == whole


def test_too_long_samples(tmp_path: Path) -> None:
    chat = load_chat_tokenizer("byte")
    prompt = len(chat.encode_prompt([USER]))
    long = {"messages": [USER, {"role": "assistant", "content": "x" * 50}]}
    hopeless = {"messages": [{"role": "user", "content": "y" * 90}, ANSWER]}
    path = jsonl(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]}, long, hopeless, {"messages": [USER, ANSWER]})
    whole = len(chat.encode_chat(long["messages"])[0])
    assert len(opened(path, max_tokens=whole - 1)) == 3  # positions are one less than tokens
    dropped = opened(path, max_tokens=whole - 2).report
    assert (dropped.samples, dropped.dropped, dropped.truncated, dropped.too_long) == (2, 2, 0, "a.jsonl, line 2")
    cut = opened(path, max_tokens=40, too_long="truncate")
    assert (len(cut), cut.report.dropped, cut.report.truncated) == (3, 1, 1)
    sample = cut.sample(1)
    assert len(sample.weights) == 40 and sample.weights.sum() == 41 - prompt
    with pytest.raises(InputError, match=r"no sample is left. too long \(4\), a.jsonl, line 1: longer than 4 tokens"):
        opened(path, max_tokens=4)


def test_more_samples_dropped_than_kept_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *samples(3), *long_samples(4))
    with pytest.raises(InputError, match="4 of 7 samples are dropped as too long, more than half") as info:
        opened(path)
    assert "a.jsonl, line 4: longer than 256 tokens" in info.value.what
    assert info.value.hint == "--too-long truncate, or a larger --max-tokens and --row-tokens"
    assert len(opened(path, too_long="truncate")) == 7
    assert len(opened(jsonl(path, *samples(4), *long_samples(4)))) == 4


def test_bad_records_are_counted_named_and_refused_above_the_share(tmp_path: Path) -> None:
    good = {"messages": SAID}
    bad = [
        {"messages": [USER]},
        {"messages": [USER, {"role": "robot", "content": "x"}]},
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        {"id": 7, **good},
        {"id": 7, **good},
        {"id": "7", **good},
        {"messages": [USER, ANSWER | {"tool_calls": [{"function": {"name": "f"}}]}]},
        {"messages": [USER]},
    ]
    path = jsonl(tmp_path / "data" / "a.jsonl", *bad)
    with open(path, "a") as stream:
        stream.write("{oops\n")
    jsonl(tmp_path / "data" / "b.jsonl", *[{"prompt": "a", "response": "b"}] * 91)
    with pytest.raises(InputError, match=r"8 of 100 records are bad, more than 1.00%") as error:
        opened(tmp_path / "data")
    report = opened(tmp_path / "data", max_bad_share=0.08).report
    assert {kind: (t.count, t.where) for kind, t in report.bad.items()} == {
        "no assistant turn": (2, "a.jsonl, line 1"),
        "unknown role": (1, "a.jsonl, line 2"),
        "empty content": (1, "a.jsonl, line 3"),
        "repeated id": (2, "a.jsonl, line 5"),
        "template fails": (1, "a.jsonl, line 7"),
        "not JSON": (1, "a.jsonl, line 9"),
    }
    assert "'7' is also that of a.jsonl, line 4" in report.bad["repeated id"].detail
    assert all(t.where in error.value.what and kind in error.value.what for kind, t in report.bad.items())
    assert (report.records, report.samples, report.bad_records) == (100, 92, 8)
    assert report.layouts == {"a.jsonl": ["messages"], "b.jsonl": ["prompt/response"]}
    said = "\n".join(report.lines())
    assert "b.jsonl: prompt/response" in said and "left out, unknown role: 1 (the first: a.jsonl, line 2" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no records"), (b"\n\n", "holds no records"), (b"{oops\n", "1 of 1 records are bad")],
)
def test_nothing_to_train_on(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        opened(tmp_path / "a.jsonl")
    if content.startswith(b"{"):
        with pytest.raises(InputError, match="no sample is left. not JSON") as info:
            opened(tmp_path / "a.jsonl", max_bad_share=1)
        assert info.value.what.endswith(", at character 2") and info.value.hint == "mend them"


def test_reasoning_put_into_the_content_is_said(tmp_path: Path) -> None:
    thought = {"messages": [USER, ANSWER | {"reasoning_content": "hm"}]}
    report = opened(jsonl(tmp_path / "a.jsonl", thought, *samples(3))).report
    assert report.folded == 1 and "<think>" in report.lines()[-1]


def test_splits(tmp_path: Path) -> None:
    data = opened(jsonl(tmp_path / "a.jsonl", *samples(40)))
    train, held = data.split(0.1, 3)
    assert (len(train), len(held)) == (36, 4)
    tokens = [[part.sample(n).tokens.tolist() for n in range(len(part))] for part in (data, train, held)]
    assert sorted(tokens[0]) == sorted(tokens[1] + tokens[2])
    assert [t for t in tokens[0] if t in tokens[1]] == tokens[1]  # order is kept
    assert [len(t) - 1 for t in tokens[2]] == held.lengths.tolist()
    assert train.trained_tokens + held.trained_tokens == data.trained_tokens
    again, other = data.split(0.1, 3), data.split(0.1, 4)
    assert [part.digest for part in again] == [train.digest, held.digest] and other[0].digest != train.digest
    assert len(data.split(1e-9, 0)[1]) == 1 and len(data.split(0.9999, 0)[0]) == 1
    whole, none = data.split(0, 0)
    assert (len(whole), len(none)) == (40, 0)
    for share in (-0.1, 1.0):
        with pytest.raises(InputError, match="held-out share"):
            data.split(share, 0)


@given(st.integers(0, 300), st.integers(-5, 2**64), st.integers(0, 50))
def test_an_epoch_is_a_permutation_of_its_own(count: int, seed: int, epoch: int) -> None:
    order = epoch_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count)) and (order == epoch_order(count, seed, epoch)).all()
    if count > 20:
        assert (order != epoch_order(count, seed, epoch + 1)).any()
        assert (order != epoch_order(count, seed + 1, epoch)).any()


def test_the_order_is_the_same_for_ever() -> None:
    """Written down once: a resumed run needs it, whatever NumPy's version."""
    assert epoch_order(8, 1234, 2).tolist() == ORDER
    positions = np.array([np.argsort(epoch_order(16, 5, epoch)) for epoch in range(2000)])
    assert abs(positions.mean(axis=0) - 7.5).max() < 5 * 4.61 / 2000**0.5  # a uniform place for each sample


ORDER = [7, 2, 6, 0, 5, 3, 1, 4]


def test_the_stored_files_hold_what_the_docs_say(tmp_path: Path) -> None:
    data = opened(jsonl(tmp_path / "a.jsonl", *samples(5)))
    (folder,) = (entry for entry in (tmp_path / "cache").iterdir() if entry.name != "files")
    tokens = np.fromfile(folder / "tokens.bin", "<i4")
    assert tokens.tolist() == [t for n in range(5) for t in data.sample(n).tokens.tolist()]
    assert json.loads((folder / "report.json").read_text())["samples"] == 5
