"""`summarise`: what is shown is what is stored, and the counts agree with counting by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_bpe import train_bpe

from infir2_core.data.prepare import prepare
from infir2_core.data.show import BORDER, histogram, summarise
from infir2_core.data.tokenizer import load_tokenizer
from infir2_core.errors import InputError


def make(folder: Path, texts: list[str], tokenizer: str = "byte") -> str:
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(source)], str(folder / "c"), tokenizer)
    return str(folder / "c")


def test_bytes_are_shown_as_text_with_the_document_end(tmp_path: Path) -> None:
    facts = summarise(make(tmp_path, ["hello\n", "日本", "third"]), documents=2)
    assert [sample["text"] for sample in facts["samples"]] == ["hello\n<|endoftext|>", "日本<|endoftext|>"]
    assert facts["lengths"] == {"shortest": 6, "median": 7.0, "mean": 20 / 3, "longest": 7}
    assert facts["samples"][0]["ids"] == [*b"hello\n", 256]


def test_borders_of_subword_tokens_are_visible(tmp_path: Path) -> None:
    folder = train_bpe(tmp_path / "bpe")
    text = "the quick brown fox: naïve"
    facts = summarise(make(tmp_path, [text], str(folder)))
    tokenizer = load_tokenizer(str(folder))
    pieces = facts["samples"][0]["text"].split(BORDER)
    assert "".join(pieces) == text + "<|endoftext|>"
    assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == pieces[:-1] and len(pieces) < len(text)


def test_long_documents_keep_their_end(tmp_path: Path) -> None:
    sample = summarise(make(tmp_path, ["x" * 1000]), most_tokens=10)["samples"][0]
    assert sample["text"] == "x" * 9 + " [... 991 tokens ...] <|endoftext|>"
    assert (sample["tokens"], sample["left_out"], len(sample["ids"])) == (1001, 991, 10)


@pytest.mark.parametrize("loss", ["json", "tokenizer", "changed"])
def test_ids_are_shown_when_the_tokenizer_is_not_to_be_had(tmp_path: Path, loss: str) -> None:
    folder = train_bpe(tmp_path / "bpe")
    prefix = make(tmp_path, ["hello"], str(folder))
    expected = [*load_tokenizer(str(folder)).encode("hello"), load_tokenizer(str(folder)).eod]
    if loss == "json":
        Path(f"{prefix}.json").unlink()
    elif loss == "tokenizer":
        (folder / "tokenizer.json").unlink()
    else:
        train_bpe(folder, 280)
    facts = summarise(prefix)
    assert facts["samples"][0]["text"] is None and facts["samples"][0]["ids"] == expected
    assert "ids are shown" in facts["note"]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_histogram_counts_every_document_once(lengths: list[int]) -> None:
    bars = histogram(np.array(lengths, np.int32))
    for bar in bars:
        inside = [n for n in lengths if bar["from"] <= n < bar["to"]]
        assert (bar["documents"], bar["tokens"]) == (len(inside), sum(inside))
    assert sum(bar["documents"] for bar in bars) == len(lengths)
    assert bars[0]["documents"] and bars[-1]["documents"]


def test_missing_corpus(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        summarise(str(tmp_path / "nothing"))
