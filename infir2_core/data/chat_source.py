"""Files of chat data to conversations, one at a time: a file or folder of any size never stands in memory.

JSONL holds one record a line (also .gz and .zst), Parquet one a row. What is wrong with a record is handed out in its
place as `Bad`, for the reader to count; what is wrong with a file stops the reading.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infir2_core.data.chat_record import KEYS, Conversation, SampleError, conversation
from infir2_core.data.sources import JSONL, PARQUET, SourceFile, find_files, opened
from infir2_core.errors import InputError, nearest

SUFFIXES = (*JSONL, *PARQUET)
READ = 1 << 20  # bytes hashed at a time
ROWS = 64  # of a Parquet file turned into objects at a time


@dataclass(frozen=True)
class Record:
    """A conversation and where it stands: index of its file, and line (JSONL) or row (Parquet) counted from 1."""

    file: int
    line: int
    said: Conversation


@dataclass(frozen=True)
class Bad:
    """A record that is no conversation, and why."""

    file: int
    line: int
    kind: str
    detail: str


def chat_files(path: Path) -> list[SourceFile]:
    """The file `path`, or every .jsonl, .ndjson and .parquet file (also .jsonl.gz and .zst) below it, sorted.

    Raises:
        InputError: nothing is there, or nothing that can be read.
    """
    if path.is_dir() and not any(_is_chat(name) for _, _, names in os.walk(path) for name in names):
        raise InputError("this folder holds no .jsonl or .parquet file", str(path), "give a folder with chat data")
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"no such file or folder: {path}", "", nearest(path.name, siblings))
    files = find_files([str(path)], SUFFIXES)
    for file in files:
        if file.kind == "text":
            hint = f"jq -c '.[]' {file.path} > {file.path.with_suffix('.jsonl')}" if path.suffix == ".json" else ""
            raise InputError(
                "chat data is JSONL (one record a line) or Parquet", str(file.path), hint or "convert it to .jsonl"
            )
    return files


def _is_chat(name: str) -> bool:
    return any(name.endswith((s, f"{s}.gz", f"{s}.zst")) for s in SUFFIXES) and not name.startswith(".")


def place(file: SourceFile, line: int) -> str:
    """Where a record stands, for messages."""
    return f"{file.name}, {'row' if file.kind == 'parquet' else 'line'} {line}"


def read_chat(files: Sequence[SourceFile]) -> Iterator[Record | Bad]:
    """Every record of `files`, in order; blank lines are no records.

    Raises:
        InputError: a damaged file, or a Parquet file without a column of a known layout.
        MachineError: the package that reads .zst or Parquet is missing.
    """
    for index, file in enumerate(files):
        for line, raw in _rows(file) if file.kind == "parquet" else _lines(file):
            try:
                yield Record(index, line, conversation(_value(raw) if isinstance(raw, bytes) else raw))
            except SampleError as error:
                yield Bad(index, line, error.kind, error.detail)


def _value(line: bytes) -> Any:
    if b"\0" in line:  # which JSON never holds, and json.loads would take for another encoding
        raise SampleError("not JSON", "not UTF-8 text (it holds zero bytes, as UTF-16 does)")
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SampleError("not JSON", f"not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise SampleError("not JSON", f"{error.msg[0].lower()}{error.msg[1:]}, at character {error.pos + 1}") from None
    except RecursionError:
        raise SampleError("not JSON", "it nests too deep") from None
    except ValueError as error:
        raise SampleError("not JSON", str(error)) from None


def _lines(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    with opened(file.path) as (stream, _):
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, line


def _rows(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table: Any = pq.ParquetFile(file.path)
    except (pa.ArrowInvalid, pa.ArrowIOError) as error:
        raise InputError(f"not a Parquet file: {error}", str(file.path), "write or download it again") from None
    columns = [name for name in table.schema_arrow.names if name in KEYS]
    answered = "prompt" in columns and not {"response", "completion"}.isdisjoint(columns)
    if not answered and {"messages", "conversations"}.isdisjoint(columns):
        found = ", ".join(table.schema_arrow.names) or "no columns"
        hint = "rename a column to messages or conversations, or two to prompt and response"
        raise InputError(f"no column of chat data; it has {found}", str(file.path), hint)
    number = 0
    try:
        for batch in table.iter_batches(batch_size=ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, _without_nulls(row)
    except (pa.ArrowInvalid, pa.ArrowIOError, OSError) as error:
        raise InputError(f"damaged Parquet file: {error}", str(file.path), "write or download it again") from None


def _without_nulls(value: Any) -> Any:
    """A value of a table without the keys that are null, at any depth.

    A column has one type, so every object in it has the keys of all of them: those that a row did not have are null.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(held) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        return [_without_nulls(held) for held in value]
    return value


def content_digests(files: Sequence[SourceFile], memory: Path) -> list[str]:
    """sha256 (hex) of each file's bytes.

    A file whose path, size and times of change are known is not read again: `memory`, a folder, remembers its digest.
    """
    return [_remembered(file, memory) for file in files]


def _remembered(file: SourceFile, memory: Path) -> str:
    stat = file.path.stat()
    named = json.dumps([str(file.path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    note = memory / hashlib.sha256(named.encode()).hexdigest()[:24]
    if note.is_file():
        known, _, proof = note.read_text(errors="replace").partition(" ")
        if proof == _proof(named, known):
            return known
    state = hashlib.sha256()
    with open(file.path, "rb") as stream:
        while piece := stream.read(READ):
            state.update(piece)
    memory.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=memory)
    with os.fdopen(handle, "w") as written:
        written.write(f"{state.hexdigest()} {_proof(named, state.hexdigest())}")
    os.replace(aside, note)
    return state.hexdigest()


def _proof(named: str, digest: str) -> str:
    """What only a note that is as it was written holds beside its digest."""
    return hashlib.sha256(f"{named} {digest}".encode()).hexdigest()
