"""`prepare`: what is stored equals tokenising by hand, and nothing is tokenised twice, whatever happens in between."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_bpe import train_bpe

from infir2_core.data import prepare as module
from infir2_core.data.prepare import plan, prepare
from infir2_core.data.tokenizer import load_tokenizer
from infir2_core.errors import InputError, MachineError


def stored(prefix: Path) -> list[list[int]]:
    """Documents of a corpus, read by megatron-core."""
    from infir2_core.data.corpus import quiet_megatron

    with quiet_megatron():
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    data = IndexedDataset(str(prefix))
    assert data.document_indices.tolist() == list(range(len(data) + 1))  # one sequence a document
    return [data[i].tolist() for i in range(len(data))]


def files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def large_jsonl(path: Path, lines: int = 12000, seed: int = 0) -> Path:
    """About 10 MB in several blocks."""
    draw = random.Random(seed)
    return jsonl(path, [draw.randbytes(400).hex() for _ in range(lines)])


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_stored_ids_are_each_document_and_its_end(tmp_path: Path, kind: str) -> None:
    ref = "byte" if kind == "byte" else str(train_bpe(tmp_path / "bpe"))
    texts = ["hello", "日本語 def f(x):", "", " \n", "end"]
    result = prepare([str(jsonl(tmp_path / "a.jsonl", texts))], str(tmp_path / "out" / "c.bin"), ref)
    tokenizer = load_tokenizer(ref)
    expected = [[*tokenizer.encode(text), tokenizer.eod] for text in texts if text.strip()]
    prefix = tmp_path / "out" / "c"
    assert stored(prefix) == expected
    made = json.loads(Path(f"{prefix}.json").read_text())
    assert (made["documents"], made["tokens"], made["skipped"]) == (3, sum(map(len, expected)), {"empty": 2})
    assert made["max_id"] == max(max(ids) for ids in expected)
    assert made["tokenizer"] == {"ref": ref, "size": tokenizer.size, "digest": tokenizer.digest, "eod": tokenizer.eod}
    assert result["prefix"] == str(prefix) and not result["already"]


@pytest.mark.parametrize(("size", "dtype"), [(260, "uint16"), (65499, "uint16"), (65500, "int32"), (151665, "int32")])
def test_dtype_is_megatrons(size: int, dtype: str) -> None:
    from megatron.core.datasets.indexed_dataset import DType

    assert module.dtype_for(size) == dtype == DType.optimal_dtype(size).__name__


def test_formats_and_compression_give_the_same_corpus(tmp_path: Path) -> None:
    import gzip

    pa, pq, zstandard = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet", "zstandard"))
    texts = [f"document {n} " * n for n in range(1, 50)]
    plain = jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    pq.write_table(pa.table({"text": texts}), tmp_path / "d.parquet")
    (tmp_path / "tree").mkdir()
    for n, text in enumerate(texts):
        (tmp_path / "tree" / f"{n:03}.txt").write_text(text)
    made = []
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "tree"):
        prepare([str(tmp_path / name)], str(tmp_path / "out" / name))
        made.append(files(tmp_path / "out" / name))
    assert all(one == made[0] for one in made)


def test_workers_do_not_change_the_result(tmp_path: Path) -> None:
    source, tree = large_jsonl(tmp_path / "a.jsonl"), tmp_path / "tree"
    tree.mkdir()
    for n in range(80):
        (tree / f"{n}.py").write_text(f"x = {n}\n")
    results = [prepare([str(source), str(tree)], str(tmp_path / f"w{n}"), workers=n) for n in (1, 3)]
    assert files(tmp_path / "w1") == files(tmp_path / "w3")
    assert results[0]["content"] == results[1]["content"] and results[0]["tokenised"] >= 4


def test_again_does_nothing_and_one_change_tokenises_one_block(tmp_path: Path) -> None:
    tree, prefix = tmp_path / "tree", tmp_path / "c"
    tree.mkdir()
    for n in range(300):
        (tree / f"{n}.txt").write_text(f"file {n} " * 20)
    done = prepare([str(tree)], str(prefix))
    assert done["tokenised"] > 4 and done["reused"] == 0
    before = os.stat(f"{prefix}.bin").st_mtime_ns
    again = prepare([str(tree)], str(prefix))
    assert again["already"] and again["tokenised"] == 0 and os.stat(f"{prefix}.bin").st_mtime_ns == before
    (tree / "150.txt").write_text("changed")
    third = prepare([str(tree)], str(prefix))
    assert (third["already"], third["tokenised"], third["reused"]) == (False, 1, done["tokenised"] - 1)
    prepare([str(tree)], str(tmp_path / "fresh"))
    assert files(prefix) == files(tmp_path / "fresh")  # copied blocks are the blocks a fresh run makes
    assert not list(Path(f"{prefix}.parts").glob("*.npz"))  # the corpus itself is the store: no second copy on disk


def test_another_tokenizer_or_key_is_another_corpus(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "one", "body": "two"}\n')
    prefix = tmp_path / "c"
    contents = [
        prepare([str(source)], str(prefix), **settings)["content"]
        for settings in ({}, {"text_key": "body"}, {"tokenizer_ref": str(train_bpe(tmp_path / "bpe"))})
    ]
    assert len(set(contents)) == 3
    tokenizer = load_tokenizer(str(tmp_path / "bpe"))
    assert stored(prefix) == [[*tokenizer.encode("one"), tokenizer.eod]]


def test_a_tokenizer_that_moved_is_the_same_tokenizer(tmp_path: Path) -> None:
    source, prefix = jsonl(tmp_path / "a.jsonl", ["one"]), tmp_path / "c"
    prepare([str(source)], str(prefix), str(train_bpe(tmp_path / "here")))
    moved = str((tmp_path / "here").rename(tmp_path / "there"))
    assert prepare([str(source)], str(prefix), moved)["already"]
    assert json.loads(Path(f"{prefix}.json").read_text())["tokenizer"]["ref"] == moved


@pytest.mark.parametrize("damage", ["bin", "idx", "json", "index"])
def test_a_damaged_corpus_is_made_again(tmp_path: Path, damage: str) -> None:
    source, prefix = jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "c"
    prepare([str(source)], str(prefix))
    good = files(prefix)
    path = tmp_path / "c.parts" / "index.json" if damage == "index" else Path(f"{prefix}.{damage}")
    path.write_bytes(path.read_bytes()[:-3])
    assert prepare([str(source)], str(prefix))["tokenised"] == 1
    assert files(prefix) == good


SCRIPT = """
import sys
from infir2_core.data import parts as p
from infir2_core.data.prepare import prepare
if __name__ == "__main__":
    real = p._tokenise
    def slow(*args):
        import time
        count = real(*args)
        print("part", flush=True)
        time.sleep(0.3)
        return count
    p._tokenise = slow  # inline when workers is 1; worker processes import the real one
    prepare([sys.argv[1]], sys.argv[2], workers=int(sys.argv[3]))
"""


def test_a_killed_run_continues(tmp_path: Path) -> None:
    source, prefix = large_jsonl(tmp_path / "a.jsonl"), tmp_path / "c"
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, script, source, prefix, "1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "part\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not Path(f"{prefix}.bin").exists()
    result = prepare([str(source)], str(prefix), workers=1)
    assert result["reused"] >= 2 and result["tokenised"] >= 1
    prepare([str(source)], str(tmp_path / "straight"), workers=1)
    assert files(prefix) == files(tmp_path / "straight")


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    source = large_jsonl(tmp_path / "a.jsonl", 60000)
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, script, source, tmp_path / "c", "2"])
    wait_for(lambda: list((tmp_path / "c.parts").glob("*.npz")))
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))


def wait_for(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_killed_between_renames_never_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, prefix = jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "c"
    prepare([str(source)], str(prefix))
    jsonl(source, ["six", "ten"])  # as many documents and tokens as before: sizes alone would not tell
    real = os.replace

    def killed_after_bin(src: Any, dst: Any) -> None:
        real(src, dst)
        if str(dst).endswith(".bin"):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed_after_bin)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(source)], str(prefix))
    monkeypatch.undo()
    assert not Path(f"{prefix}.json").exists()
    jsonl(source, ["one", "two"])
    assert not prepare([str(source)], str(prefix))["already"]
    assert bytes(stored(prefix)[0][:-1]) == b"one"


@pytest.mark.parametrize(
    ("bad", "message", "hint", "workers"),
    [
        ("{broken", "not JSON", "line 9001", 1),
        ("{broken", "not JSON", "line 9001", 2),
        ('["text"]', "not a JSON object", "every line", 1),
        ('{"texte": "x"}', "no key 'text'", "'texte'", 1),
        ('{"text": 5}', "'text' is int", "--text-key", 1),
        ('{"text": "\xff"}', "not JSON", "line 9001", 1),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, message: str, hint: str, workers: int) -> None:
    lines = large_jsonl(tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    source = tmp_path / "b.jsonl"
    source.write_bytes(b"".join([*lines[:9000], bad.encode("latin-1") + b"\n", *lines[9000:]]))
    with pytest.raises(InputError, match=message) as error:
        prepare([str(source)], str(tmp_path / "c"), workers=workers)
    assert error.value.where == f"{source}, line 9001"
    assert hint in error.value.hint
    source.write_bytes(b"".join(lines))
    assert prepare([str(source)], str(tmp_path / "c"), workers=1)["reused"] >= 1  # what was good is kept


def test_blank_lines_are_nothing_and_half_surrogates_are_replaced(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('\n{"text": "a\\ud83db"}\n   \n{"text": "\\ud83d\\ude00"}\n')
    prepare([str(source)], str(tmp_path / "c"))
    decode = load_tokenizer("byte").decode
    assert [decode(ids[:-1]) for ids in stored(tmp_path / "c")] == ["a\ufffd\ufffd\ufffdb", "😀"]


def test_sources_without_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hold no text"):
        prepare([str(jsonl(tmp_path / "a.jsonl", ["", " "]))], str(tmp_path / "c"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "c.parts"]


def test_limit_is_part_of_the_content(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["x" * 1000] * 3000)
    few = prepare([str(source)], str(tmp_path / "c"), limit_mb=1)
    assert few["documents"] == -(-1_000_000 // 1013)
    assert prepare([str(source)], str(tmp_path / "c"))["documents"] == 3000


def test_too_little_room_is_said_before_work_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["one"])
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(MachineError, match="no room on disk: about") as error:
        prepare([str(source)], str(tmp_path / "c"))
    assert error.value.exit_code == 4 and "--limit-mb" in error.value.hint


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["one"])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "c.bin"))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(MachineError, match="no room left on disk") as error:
        prepare([str(source)], str(tmp_path / "c"))
    assert "continues" in error.value.hint


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["one"])
    with pytest.raises(InputError, match="cannot read or write here"):
        prepare([str(source)], str(source / "c"))
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.geteuid() != 0:  # root may write anywhere
        with pytest.raises(InputError, match="Permission denied"):
            prepare([str(source)], str(folder / "c"))


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["one"])
    with module._locked(tmp_path / "c.parts"), pytest.raises(InputError, match="another `infir2 data prepare`"):
        prepare([str(source)], str(tmp_path / "c"))


def test_plan_writes_nothing_and_estimates_the_size(tmp_path: Path) -> None:
    source = large_jsonl(tmp_path / "a.jsonl", 2000)
    planned = plan([str(source)], str(tmp_path / "c"), "byte")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    prepare([str(source)], str(tmp_path / "c"))
    assert planned["output_bytes"] == pytest.approx(os.path.getsize(tmp_path / "c.bin"), rel=0.05)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int, int]] = []
    source = large_jsonl(tmp_path / "a.jsonl")
    result = prepare([str(source)], str(tmp_path / "c"), workers=2, progress=lambda *args: seen.append(args))
    reading = [s for s in seen if s[0] == "tokenise"]
    assert [s[1] for s in reading] == sorted(s[1] for s in reading)
    assert reading[-1][1:] == (source.stat().st_size, source.stat().st_size, result["tokens"])
