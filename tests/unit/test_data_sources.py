"""Reading sources: every format gives the same documents, borders follow content, and damaged files are refused."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from infir2_core.data.sources import LARGEST, STDLIB, find_files, read_blocks
from infir2_core.errors import InputError


def documents(sources: list[str], key: str = "text", limit: int = 0, ext: tuple[str, ...] = ()) -> list[str]:
    """All documents of `sources` as text, whatever the blocks."""
    found = []
    for block in read_blocks(find_files(sources, ext), key, Counter(), limit):
        for piece in block.payload:
            found.append(json.loads(piece)[key] if block.kind == "jsonl" else piece.decode())
    return found


def squeeze(data: bytes, path: Path) -> Path:
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        import zstandard

        half = len(data) // 2  # two frames, as parallel compressors write
        data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    path.write_bytes(data)
    return path


TEXTS = ["one\ntwo\n", "zwölf 日本語", "x" * 3000, "last"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    assert documents([str(squeeze(lines, tmp_path / f"a.jsonl{suffix}"))]) == TEXTS


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    assert documents([str(squeeze(TEXTS[1].encode(), tmp_path / f"a.txt{suffix}"))]) == [TEXTS[1]]


def test_parquet_column(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": [*TEXTS, None], "n": range(5)}), path, row_group_size=2)
    assert documents([str(path)], key="body") == [*TEXTS, ""]
    with pytest.raises(InputError, match="no column 'boddy'") as error:
        documents([str(path)], key="boddy")
    assert "'body'" in error.value.hint
    with pytest.raises(InputError, match="holds int64, not text"):
        documents([str(path)], key="n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="not a Parquet file"):
        documents([str(path)], key="body")


def test_tree_is_sorted_and_skips_what_is_not_text(tmp_path: Path) -> None:
    for name, data in {
        "b/z.py": b"z", "a.py": b"a", "b/a.md": b"m", "bin.py": b"\0\1", "latin.py": "ä".encode("latin-1"),
        "empty.py": b" \n", ".hidden.py": b"h", ".git/x.py": b"g", "__pycache__/x.py": b"c", "data.bin": b"d",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    skipped = Counter[str]()
    blocks = list(read_blocks(find_files([str(tmp_path)]), "text", skipped))
    assert [piece for block in blocks for piece in block.payload] == [b"a", b"m", b"z"]
    assert skipped == {"binary": 1, "not_utf8": 1, "empty": 1}
    assert documents([str(tmp_path)], ext=("md",)) == ["m"]
    with pytest.raises(InputError, match="no file to read.*\\.py 6") as error:
        find_files([str(tmp_path)], [".rs"])
    assert "--ext" in error.value.hint


def test_standard_library_is_there_and_leaves_tests_out() -> None:
    names = [file.name for file in find_files([STDLIB])]
    assert names == sorted(names) and len(names) > 300
    assert {"json/decoder.py", "os.py", "xml/dom/minidom.py"} <= set(names)
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in name.split("/")[:-1])


@pytest.mark.parametrize("kind", ["jsonl", "tree"])
def test_limit_ends_after_the_document_that_crosses_it(tmp_path: Path, kind: str) -> None:
    if kind == "tree":
        for n in range(10):
            (tmp_path / f"{n}.txt").write_text("x" * 100)
        source = tmp_path
    else:
        source = tmp_path / "a.jsonl"
        source.write_text("".join(json.dumps({"text": "x" * 88}) + "\n" for _ in range(10)))  # 101 bytes a line
    assert len(documents([str(source)], limit=250)) == 3
    assert len(documents([str(source)], limit=10**6)) == 10


def keys(source: Path) -> list[str]:
    return [block.digest() for block in read_blocks(find_files([str(source)]), "text", Counter())]


def test_a_change_in_a_tree_touches_one_block(tmp_path: Path) -> None:
    for n in range(300):
        (tmp_path / f"{n}.txt").write_text(f"file {n}")
    before = keys(tmp_path)
    (tmp_path / "100.txt").write_text("changed")
    assert len(before) > 4 and len(set(keys(tmp_path)) - set(before)) == 1
    (tmp_path / "100.txt").write_text("file 100")
    (tmp_path / "77777.txt").write_text("new")
    assert len(set(keys(tmp_path)) - set(before)) <= 2  # a new file may itself end a block


def test_an_insertion_in_jsonl_moves_only_near_borders(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = [json.dumps({"text": draw.randbytes(400).hex()}) + "\n" for _ in range(16000)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(lines))
    before = keys(path)
    path.write_text("".join([*lines[:3000], '{"text": "new"}\n', *lines[3000:]]))
    assert len(before) >= 4 and len(set(keys(path)) - set(before)) == 1


def test_blocks_stay_bounded_and_account_for_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(n) * 5000}) + "\n" for n in range(1500)))
    blocks = list(read_blocks(find_files([str(path)]), "text", Counter()))
    assert all(block.size < LARGEST + 30_000 for block in blocks)
    assert b"".join(piece for block in blocks for piece in block.payload) == path.read_bytes()
    assert sum(block.read for block in blocks) == path.stat().st_size
    assert [b.first_line for b in blocks] == [1 + sum(len(c.payload) for c in blocks[:i]) for i in range(len(blocks))]


def test_missing_source_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("{}")
    with pytest.raises(InputError, match="no such file or folder") as error:
        find_files([str(tmp_path / "corpsu.jsonl")])
    assert "corpus.jsonl" in error.value.hint


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_empty_sources_are_refused(tmp_path: Path, name: str) -> None:
    path = squeeze(b"", tmp_path / name)
    with pytest.raises(InputError, match="empty|no documents") as error:
        documents([str(path)])
    assert str(path) in error.value.where


def test_listed_files_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok \xff no")
    with pytest.raises(InputError, match="not UTF-8 text .byte 3"):
        documents([str(tmp_path / "a.txt")])
    (tmp_path / "b.dat").write_bytes(b"\0\0\0")
    with pytest.raises(InputError, match="binary file"):
        documents([str(tmp_path / "b.dat")])


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_compressed_files(tmp_path: Path, suffix: str) -> None:
    lines = "".join(json.dumps({"text": random.Random(n).randbytes(50).hex()}) + "\n" for n in range(500)).encode()
    path = squeeze(lines, tmp_path / f"a.jsonl{suffix}")
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(InputError, match=f"damaged {suffix} file"):
        documents([str(path)])
    path.write_bytes(b"this was never compressed")
    with pytest.raises(InputError, match=f"damaged {suffix} file"):
        documents([str(path)])
