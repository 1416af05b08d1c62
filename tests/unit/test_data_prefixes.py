"""Finding corpora and refusing those that cannot be trained on: each defect made by hand, each message checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_bpe import train_bpe

from infir2_core.data.corpus import quiet_megatron
from infir2_core.data.prefixes import check_prefixes, describe_prefix, expand_blend, expand_prefixes, read_index
from infir2_core.data.prepare import prepare
from infir2_core.errors import InputError

with quiet_megatron():
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def make(prefix: Path, texts: tuple[str, ...] = ("hello", "wörld"), tokenizer: str = "byte") -> str:
    source = prefix.with_suffix(".src.jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(source)], str(prefix), tokenizer)
    return str(prefix)


def test_describe(tmp_path: Path) -> None:
    facts = describe_prefix(make(tmp_path / "c"))
    assert {key: facts[key] for key in ("documents", "tokens", "bytes", "dtype")} == {
        "documents": 2,
        "tokens": 13,
        "bytes": 26,
        "dtype": "uint16",
    }
    assert facts["made"]["tokenizer"]["ref"] == "byte"
    (tmp_path / "c.json").unlink()
    assert describe_prefix(str(tmp_path / "c"))["made"] is None


def test_index_reads_what_megatron_writes(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.int32)
    builder.add_document(np.arange(7), [3, 4])  # two sequences in one document, as sentence splitters write
    builder.add_document(np.arange(2), [2])
    builder.finalize(str(tmp_path / "c.idx"))
    index = read_index(str(tmp_path / "c"))
    assert (index.lengths_N.tolist(), index.documents, index.tokens) == ([3, 4, 2], 2, 9)
    assert index.token_array().tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


DEFECTS = {
    "no .bin": ("bin", None, "no such file"),
    "no .idx": ("idx", None, "no such file"),
    "short .bin": ("bin", lambda b: b[:-4], "truncated: 4 bytes missing"),
    "long .bin": ("bin", lambda b: b + b"1234", "too long: 4 bytes too many"),
    "empty .bin": ("bin", lambda b: b"", "truncated: 26 bytes missing"),
    "empty .idx": ("idx", lambda b: b"", "not a Megatron index"),
    "foreign .idx": ("idx", lambda b: b"PK" + b[2:], "not a Megatron index"),
    "other version": ("idx", lambda b: b[:9] + b"\2" + b[10:], "unknown kind"),
    "other dtype": ("idx", lambda b: b[:17] + b"\7" + b[18:], "unknown kind .version 1, type 7"),
    "short .idx": ("idx", lambda b: b[:-1], "damaged index: 81 bytes where its header asks for 82"),
    "wrong length": ("idx", lambda b: b[:34] + b"\1" + b[35:], "contradict each other"),
    "negative length": ("idx", lambda b: b[:34] + b"\xff\xff\xff\xff" + b[38:], "contradict each other"),
    "wrong border": ("idx", lambda b: b[:-8] + b"\1" + b[-7:], "contradict each other"),
    "damaged .json": ("json", lambda b: b[:-9], "damaged"),
    "foreign .json": ("json", lambda b: b.replace(b'"tokens": 13', b'"tokens": 14'), "describes another corpus"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects(tmp_path: Path, name: str) -> None:
    suffix, change, message = DEFECTS[name]
    prefix = make(tmp_path / "c")
    check_prefixes([prefix], 260)
    path = tmp_path / f"c.{suffix}"
    path.unlink() if change is None else edit(path, change)
    with pytest.raises(InputError, match=message) as error:
        check_prefixes([prefix], 260)
    assert prefix in error.value.what + error.value.where and error.value.hint and error.value.exit_code == 3


def test_empty_corpora(tmp_path: Path) -> None:
    for name, documents in (("none", []), ("hollow", [[]])):
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.int32)
        for document in documents:
            builder.add_document(np.array(document), [len(document)])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        with pytest.raises(InputError, match="this corpus is empty"):
            check_prefixes([str(tmp_path / name)], 260)
    with pytest.raises(InputError, match="no training data given"):
        check_prefixes([], 260)


def test_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    prefix = make(tmp_path / "c")
    with pytest.raises(InputError, match="the tokenizer byte has 260 ids, but the model's vocabulary has 259"):
        check_prefixes([prefix], 259)
    (tmp_path / "c.json").unlink()  # a corpus of another tool: its ids are looked through (the highest is 256)
    check_prefixes([prefix], 257)
    with pytest.raises(InputError, match="ids go up to 256, but the model's vocabulary has 256"):
        check_prefixes([prefix], 256)


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.int32)
    builder.add_document(np.array([1, -1]), [2])
    builder.finalize(str(tmp_path / "c.idx"))
    with pytest.raises(InputError, match="negative token id -1"):
        check_prefixes([str(tmp_path / "c")], 260)


def test_corpora_of_different_tokenizers(tmp_path: Path) -> None:
    one, other = make(tmp_path / "a"), make(tmp_path / "b", tokenizer=str(train_bpe(tmp_path / "bpe")))
    with pytest.raises(InputError, match="different tokenizers"):
        check_prefixes([one, other], 1000)


def test_expand_names_globs_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    web = tmp_path / "data" / "web"
    web.mkdir(parents=True)
    a, b = make(web / "a"), make(web / "b")
    assert expand_prefixes(a) == expand_prefixes(f"{a}.bin") == expand_prefixes(f"{a}.idx") == [a]
    assert expand_prefixes(str(web / "*")) == expand_prefixes(str(web / "*.bin")) == [a, b]
    assert expand_prefixes(str(web / "[b]")) == [b]
    monkeypatch.chdir(tmp_path)
    assert expand_prefixes("data/web/*") == ["data/web/a", "data/web/b"]
    lines = tmp_path / "data" / "list.txt"
    lines.write_text(f"# what we train on\nweb/b.bin\n\n{a}  # absolute\n")
    assert expand_prefixes(f"@{lines}") == [b, a]


def test_blend_shares_a_weight_by_tokens_or_as_the_list_says(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", ("12345678",)), make(tmp_path / "b", ("12",))  # 9 and 3 tokens with their ends
    assert expand_blend([(2.0, str(tmp_path / "*"))]) == [(1.5, a), (0.5, b)]
    (tmp_path / "l.txt").write_text("a 1\nb 3\n")
    assert expand_blend([(2.0, f"@{tmp_path}/l.txt"), (5.0, a)]) == [(0.5, a), (1.5, b), (5.0, a)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read this list"),
        ("# nothing\n", "names no corpus"),
        ("a\nb heavy\n", "positive weight"),
        ("a 0\n", "positive weight"),
        ("a -1\n", "positive weight"),
        ("a nan\n", "positive weight"),
        ("a 1 2\n", "positive weight"),
        ("a 1\nb\n", "some lines have a weight"),
    ],
)
def test_bad_lists(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "l.txt").write_text(content)
    with pytest.raises(InputError, match=message) as error:
        expand_prefixes(f"@{tmp_path}/l.txt")
    assert str(tmp_path / "l.txt") in error.value.where


def test_a_glob_without_match_and_a_misspelt_prefix(tmp_path: Path) -> None:
    make(tmp_path / "stdlib")
    with pytest.raises(InputError, match="no corpus matches"):
        expand_prefixes(f"{tmp_path}/x*")
    with pytest.raises(InputError, match="no such file") as error:
        check_prefixes([str(tmp_path / "stdlb")], 260)
    assert "'stdlib'" in error.value.hint
