"""The chat set of docstrings: what is written is what Python itself says of these functions."""

from __future__ import annotations

import inspect
import json
import queue
import textwrap
from pathlib import Path

import pytest

from infir2_core.data.chat_record import conversation
from infir2_core.data.docstrings import write_docstring_chat
from infir2_core.errors import InputError


def test_samples_of_the_standard_library(tmp_path: Path) -> None:
    counts = write_docstring_chat(tmp_path / "new" / "a.jsonl")
    records = [json.loads(line) for line in (tmp_path / "new" / "a.jsonl").read_text(encoding="utf-8").splitlines()]
    assert counts["samples"] == len(records) > 3000 and counts["functions"] >= len(records)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.jsonl"]
    asked = [conversation(record).messages[0]["content"] for record in records]
    assert len(set(asked)) == len({record["id"] for record in records}) == len(records)
    answers = {record["id"]: record["messages"][1]["content"] for record in records}
    asked_of = {record["id"]: record["messages"][0]["content"] for record in records}
    for function in (queue.Queue.put, json.loads, textwrap.dedent, inspect.getdoc):
        name = f"{function.__module__}.{function.__qualname__}"
        documented = " ".join((inspect.getdoc(function) or "").split())
        assert documented.startswith(answers[name]) and answers[name].endswith(".")
        module, signature = asked_of[name].split("\n")
        assert module == f"# {function.__module__}" and signature.startswith(f"def {function.__name__}(")
        parameters = list(inspect.signature(function).parameters)
        assert [p for p in parameters if p not in signature] == []
    assert all(answer[-1] in ".!?" and "\n" not in answer for answer in answers.values())


def test_limit_and_seed_choose_and_order(tmp_path: Path) -> None:
    def lines(name: str, limit: int, seed: int) -> list[str]:
        write_docstring_chat(tmp_path / name, limit, seed)
        return (tmp_path / name).read_text(encoding="utf-8").splitlines()

    ten, five, other = lines("a.jsonl", 10, 1), lines("b.ndjson", 5, 1), lines("c.jsonl", 10, 2)
    assert ten[:5] == five and len(ten) == 10 and ten != other
    planned = tmp_path / "d.jsonl"
    assert write_docstring_chat(planned, 7, dry_run=True)["samples"] == 7 and not planned.exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="cannot write"):
        write_docstring_chat(tmp_path / "file" / "a.jsonl", 1)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


def test_only_a_demo_set_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    write_docstring_chat(out, 5)
    before = out.read_bytes()
    write_docstring_chat(out, 5)
    assert out.read_bytes() == before
    write_docstring_chat(out, 9, seed=1)
    made = out.read_text(encoding="utf-8")
    assert len(made.splitlines()) == 9
    other = json.dumps({"id": "x", "messages": [{"role": "user", "content": "# x"}, {"role": "assistant"}]})
    for kept in (b"mine", made.encode() + b"{}\n", made.encode() + other.encode() + b"\n", made.encode()[:-1], b"\xff"):
        out.write_bytes(kept)
        for dry_run in (False, True):
            with pytest.raises(InputError, match="would be overwritten"):
                write_docstring_chat(out, 5, dry_run=dry_run)
        assert out.read_bytes() == kept
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "link.jsonl").symlink_to("/dev/null")
    for name in ("folder.jsonl", "link.jsonl"):
        with pytest.raises(InputError, match="would be overwritten"):
            write_docstring_chat(tmp_path / name, 1)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.txt", "x", "x.parquet"])
def test_a_name_that_would_not_be_read_as_it_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"\.jsonl or \.ndjson") as info:
        write_docstring_chat(tmp_path / name, 1)
    assert ".jsonl" in info.value.hint and not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="names no file"):
        write_docstring_chat(Path(""), 1)
