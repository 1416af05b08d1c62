"""Safetensors files by rows: a header that is checked before it is believed, reads and writes at offsets.

Converting must not hold a model in memory, so a tensor is read and written a few rows at a time, by several threads at
once, and the size of every output is known before its first byte is made. The format is the public one (8-byte
little-endian header length, JSON header, raw little-endian data).

Nothing here knows what a tensor means.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..train.shards import DTYPES, NAMES, raw_bytes

MAX_HEADER = 100_000_000  # bytes; what the safetensors library accepts
_AGAIN = "copy or download the file again"
# First bytes of what people rename by mistake.
_OTHERS = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x80\x02": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"GGUF": "a GGUF file",
    b"version https://git-lfs": "a git-lfs pointer (type: git lfs pull)",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
    b"\x1f\x8b": "a gzip archive",
}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its dtype and shape, and the bytes [start, start + nbytes) that hold it."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def rows(self) -> int:
        """Extent of dim 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]


def read_header(path: Path) -> dict[str, Entry]:
    """Tensor name -> its place in a safetensors file, in the order of the data.

    Raises:
        InputError: the file is none, is truncated, or its header contradicts itself or the file's size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            text = file.read(length) if 2 <= length <= min(MAX_HEADER, size - 8) else b""
            file.seek(0)
            begin = file.read(32)
    except OSError as error:
        raise InputError(f"the file cannot be read: {error.strerror}", str(path)) from error
    for magic, kind in _OTHERS.items():
        if begin.startswith(magic) and not text.startswith(b"{"):  # a header length may look like a pickle
            raise InputError(f"this is no safetensors file but {kind}", str(path), _AGAIN)
    if not text:
        what = "it ends inside its header" if 2 <= length <= MAX_HEADER else "its header length makes no sense"
        raise InputError(f"not a readable safetensors file: {what}", str(path), _AGAIN)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        entries = [_entry(name, record, path, 8 + length) for name, record in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(f"not a readable safetensors file: {error}", str(path), _AGAIN) from error
    position = 8 + length
    for entry in sorted(entries, key=lambda e: (e.start, e.nbytes)):
        if entry.start != position:
            raise InputError(f"not a readable safetensors file: '{entry.name}' overlaps or leaves a gap", str(path))
        position += entry.nbytes
    if position != size:
        kind = "truncated" if size < position else "longer than its header says"
        raise InputError(f"the file is {kind}: {size} bytes instead of {position}", str(path), _AGAIN)
    return {entry.name: entry for entry in sorted(entries, key=lambda e: (e.start, e.nbytes))}


def _entry(name: str, record: dict[str, Any], path: Path, base: int) -> Entry:
    if record["dtype"] not in DTYPES:
        raise ValueError(f"'{name}' has the unknown dtype {record['dtype']}")
    dtype, shape = DTYPES[record["dtype"]], tuple(int(extent) for extent in record["shape"])
    begin, end = (int(offset) for offset in record["data_offsets"])
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise ValueError(f"'{name}' of shape {list(shape)} does not fill its {end - begin} bytes")
    return Entry(name, path, dtype, shape, base + begin, end - begin)


class Reader:
    """Reads rows of tensors from one file; may be shared by threads. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)

    def rows(self, entry: Entry, first: int = 0, count: int | None = None) -> Tensor:
        """Rows [first, first + count) of a tensor (all of them by default) on the CPU, in its dtype.

        Raises:
            InputError: the file has become shorter since its header was read.
        """
        shape = (entry.rows - first if count is None else count, *entry.row_shape) if entry.shape else ()
        tensor = torch.empty(shape, dtype=entry.dtype)
        target, width = raw_bytes(tensor), math.prod(entry.row_shape) * entry.dtype.itemsize
        read = 0
        while read < len(target):
            got = os.preadv(self._descriptor, [target[read:]], entry.start + first * width + read)
            if got == 0:
                raise InputError(f"the file ends inside tensor '{entry.name}'", str(self.path), _AGAIN)
            read += got
        return tensor

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


class Writer:
    """Writes one file whose tensors are announced beforehand; rows may arrive in any order and from any thread.

    Args:
        path: created, or emptied when it is there.
        tensors: name -> dtype and shape of all that will be written.

    Raises:
        OSError: no room for the whole file, or no permission.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.path, self.tensors = path, dict(tensors)
        # Widest elements come before narrow ones, so that every tensor starts on a multiple of its element size.
        order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position, places = 0, {}
        for name in order:
            dtype, shape = tensors[name]
            places[name] = position
            end = position + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._places = {name: 8 + len(text) + place for name, place in places.items()}
        self.nbytes = 8 + len(text) + position
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(self._descriptor, 0, self.nbytes)  # a full disk shows now, not after an hour
            self._write(memoryview(struct.pack("<Q", len(text)) + text), 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, name: str, rows: Tensor, first: int = 0) -> None:
        """Write contiguous CPU `rows` at row `first` of tensor `name`."""
        dtype, shape = self.tensors[name]
        if rows.dtype != dtype or tuple(rows.shape[1:]) != shape[1:]:
            raise ValueError(f"'{name}' is {dtype} {list(shape)}, got rows of {rows.dtype} {list(rows.shape)}")
        width = math.prod(shape[1:]) * dtype.itemsize
        self._write(raw_bytes(rows), self._places[name] + first * width)

    def _write(self, data: memoryview, offset: int) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], offset + written)

    def close(self, sync: bool = True) -> None:
        """Force everything to the disk (unless the file is to be thrown away) and close."""
        try:
            if sync:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
