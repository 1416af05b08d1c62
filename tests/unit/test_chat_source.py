"""Records of every layout give the same conversation; what is wrong is named with its kind and place."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infir2_core.data.chat_record import Conversation, SampleError, conversation
from infir2_core.data.chat_source import Bad, Record, chat_files, content_digests, place, read_chat
from infir2_core.errors import InputError

SAID = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]
LAYOUTS = {
    "messages": {"messages": SAID},
    "conversations": {
        "system": "be short",
        "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}],
    },
    "prompt/response": {"system": "be short", "prompt": "2 + 2?", "response": "4"},
    "prompt/completion": {"prompt": SAID[:2], "completion": SAID[2:]},
}
DEEP = "[" * 100_000
USER, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}


def jsonl(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(layout: str) -> None:
    assert conversation(LAYOUTS[layout]) == Conversation(SAID, None, None, layout)


def test_tools_in_either_manner() -> None:
    """ShareGPT's function_call and observation, and OpenAI's arguments as JSON text, are the same conversation."""
    call = {"name": "add", "arguments": {"a": 2}}
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": ""},
            {"from": "gpt", "value": "4"},
        ],
        "tools": json.dumps([{"name": "add"}]),
    }
    written = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    openai = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [written], "function_call": None},
            {"role": "tool", "content": [{"type": "text", "text": ""}]},
            {"role": "assistant", "content": "4", "tool_calls": None},
        ],
        "tools": [{"name": "add"}],
    }
    one, other = conversation(sharegpt), conversation(openai)
    assert one.messages == other.messages and one.tools == other.tools == [{"name": "add"}]
    assert one.messages[1]["tool_calls"] == [{"type": "function", "function": call}]


BAD: list[tuple[str, Any, str]] = [
    ("not a record", [1], "list"),
    ("no messages", {"text": "x"}, "it has text"),
    ("no messages", {"messages": []}, "not a list with messages"),
    ("no messages", {"messages": "hi"}, "not a list with messages"),
    ("no messages", {"messages": ["hi"]}, "message 1"),
    ("no messages", {"prompt": "x"}, "it has prompt"),
    ("unknown role", {"messages": [USER, {"role": "robot", "content": "x"}]}, "message 2 has the role 'robot'"),
    ("unknown role", {"messages": [{"content": "x"}]}, "message 1 has the role None"),
    ("unknown role", {"conversations": [{"from": ["x"], "value": "x"}]}, "message 1"),
    ("empty content", {"messages": [{"role": "user", "content": " \n"}, ANSWER]}, "message 1 (user)"),
    ("empty content", {"messages": [USER, {"role": "assistant", "content": None}]}, "message 2 (assistant)"),
    ("empty content", {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": []}]}, "message 2"),
    ("content is not text", {"messages": [USER, {"role": "assistant", "content": 4}]}, "int"),
    ("content is not text", {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "list"),
    ("content is not text", {"messages": [{"role": "user", "content": "\ud800"}, ANSWER]}, "surrogate"),
    ("no assistant turn", {"messages": [USER, USER]}, "2 messages"),
    ("broken tool call", {"messages": [USER, ANSWER | {"tool_calls": [{"function": {}}]}]}, "without a name"),
    ("broken tool call", {"conversations": [{"from": "function_call", "value": "add 2"}]}, "not JSON"),
    ("broken tools", {"messages": [USER, ANSWER], "tools": "nonsense"}, "schemas"),
    ("broken tools", {"messages": [USER, ANSWER], "tools": DEEP}, "too deep"),
    (
        "broken tool call",
        {"messages": [USER, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}]},
        "too deep",
    ),
    ("broken tool call", {"conversations": [{"from": "function_call", "value": DEEP}]}, "too deep"),
]


@pytest.mark.parametrize(("kind", "record", "detail"), BAD)
def test_bad_records(kind: str, record: Any, detail: str) -> None:
    with pytest.raises(SampleError) as error:
        conversation(record)
    assert error.value.kind == kind and detail in error.value.detail


def test_lines_and_rows_in_order_with_their_places(tmp_path: Path) -> None:
    good = {"messages": [USER, ANSWER]}
    (tmp_path / "data" / "b").mkdir(parents=True)
    lines = [json.dumps(good), "", "{broken", json.dumps(good), '{"messages": "\\xff"}', "\ufeff" + json.dumps(good)]
    (tmp_path / "data" / "b" / "x.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    with gzip.open(tmp_path / "data" / "a.jsonl.gz", "wt") as stream:
        stream.write(json.dumps(good) + "\n")
    (tmp_path / "data" / "notes.txt").write_text("no chat")
    table = {"id": ["1", "2"], "messages": [[USER | {"extra": None}, ANSWER], None], "score": [0.5, 0.1]}
    pq.write_table(pa.table(table), tmp_path / "data" / "c.parquet")
    files = chat_files(tmp_path / "data")
    assert [file.name for file in files] == ["a.jsonl.gz", "b/x.jsonl", "c.parquet"]
    records = list(read_chat(files))
    assert [(r.file, r.line, isinstance(r, Record)) for r in records] == [
        (0, 1, True), (1, 1, True), (1, 3, False), (1, 4, True), (1, 5, False), (1, 6, True), (1, 7, False),
        (2, 1, True), (2, 2, False),
    ]  # fmt: skip
    bad = [record for record in records if isinstance(record, Bad)]
    assert [b.kind for b in bad] == ["not JSON", "not JSON", "not JSON", "no messages"] and "UTF-8" in bad[2].detail
    assert place(files[2], 2) == "c.parquet, row 2" and place(files[1], 3) == "b/x.jsonl, line 3"
    assert all(r.said.messages == [USER, ANSWER] for r in records if isinstance(r, Record))


def test_a_table_adds_no_keys_to_what_its_rows_hold(tmp_path: Path) -> None:
    """Arrow gives each object of a column the keys of all of them."""

    def record(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        schema = {"name": name, "parameters": {"properties": {key: {"type": "any"} for key in arguments}}}
        turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
        return {"messages": [*turns, ANSWER], "tools": [schema]}

    rows = [record("f", {"a": 1}), record("g", {"b": "x", "c": {"d": [1, None]}}), record("h", {"c": {"e": 2}})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = list(read_chat(chat_files(tmp_path / "a.parquet")))
    assert [r.said for r in read if isinstance(r, Record)] == [conversation(row) for row in rows]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_no_json(tmp_path: Path, encoding: str) -> None:
    text = "".join(json.dumps({"prompt": "é", "response": "b"}, ensure_ascii=False) + "\n" for _ in range(2))
    (tmp_path / "a.jsonl").write_bytes(text.encode(encoding))
    read = list(read_chat(chat_files(tmp_path / "a.jsonl")))
    assert read and all(isinstance(r, Bad) and r.kind == "not JSON" and "not UTF-8" in r.detail for r in read)


def test_a_line_that_nests_too_deep_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(DEEP + "\n" + json.dumps({"prompt": "a", "response": "b"}) + "\n")
    bad, good = read_chat(chat_files(tmp_path / "a.jsonl"))
    assert isinstance(bad, Bad) and (bad.kind, bad.detail) == ("not JSON", "it nests too deep")
    assert isinstance(good, Record)


def test_reading_holds_little_at_a_time(tmp_path: Path) -> None:
    record = {"messages": [USER, {"role": "assistant", "content": "word " * 2000}]}
    jsonl(tmp_path / "big.jsonl", *[record] * 1000)
    rows = [record] * 1000
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "big.parquet", row_group_size=50)
    assert (tmp_path / "big.jsonl").stat().st_size > 10e6
    for name in ("big.jsonl", "big.parquet"):
        files = chat_files(tmp_path / name)
        tracemalloc.start()
        assert sum(isinstance(r, Record) for r in read_chat(files)) == 1000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5e6, name


def test_a_known_file_is_not_hashed_again_and_a_changed_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, memory = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"}), tmp_path / "memory"
    first = content_digests(chat_files(path), memory)
    other = jsonl(tmp_path / "elsewhere" / "b.jsonl", {"prompt": "a", "response": "b"})
    assert content_digests(chat_files(other), memory) == first
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", lambda *a, **k: pytest.fail("it was opened"))
        assert content_digests(chat_files(path), memory) == first
    before = path.stat()
    jsonl(path, {"prompt": "a", "response": "c"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync and tar leave it
    assert path.stat().st_size == before.st_size
    assert content_digests(chat_files(path), memory) != first


@pytest.mark.parametrize("garbage", [b"a" * 64, b"a" * 129, b"\xff" * 64, b"", b"0" * 64 + b" " + b"0" * 64])
def test_a_damaged_memory_is_not_believed(tmp_path: Path, garbage: bytes) -> None:
    path, memory = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"}), tmp_path / "memory"
    right = content_digests(chat_files(path), memory)
    (note,) = memory.iterdir()
    written = note.read_bytes()
    note.write_bytes(garbage)
    assert content_digests(chat_files(path), memory) == right and note.read_bytes() == written


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing.jsonl", None, "no such file or folder"),
        ("folder/notes.txt", b"x", "holds no .jsonl or .parquet"),
        ("a.json", b"[]", "JSONL"),
        ("a.parquet", b"PAR", "not a Parquet file"),
        ("a.jsonl.gz", b"no gzip", "damaged .gz file"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read_chat(chat_files(path.parent if name.startswith("folder") else path)))


def test_a_table_without_chat_columns(tmp_path: Path) -> None:
    for columns in ({"text": ["a"]}, {"id": ["1"], "text": ["a"]}, {"prompt": ["a"], "text": ["a"]}):
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=f"it has {', '.join(columns)}\\n") as info:
            list(read_chat(chat_files(tmp_path / "a.parquet")))
        assert "messages or conversations, or two to prompt and response" in info.value.hint
