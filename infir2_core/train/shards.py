"""One safetensors file of a checkpoint: written and hashed in one pass, read back by rows.

The format is the public one (8-byte little-endian header length, JSON header, raw little-endian data), so any
safetensors reader opens these files. It is written here rather than through the library because a checkpoint needs
three things at once: the sha256 of what went to disk without reading it back, an fsync before anyone may rename the
folder, and row ranges of sharded tensors read straight into fresh memory (no memory map that outlives the file).

This file knows nothing of steps, manifests or ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

CHUNK = 1 << 24  # bytes written and hashed at a time: large enough that both release the interpreter lock for long

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Shard:
    """Which rows of a tensor a rank holds: rows `offset` to `offset + rows` of a tensor of global `shape` (dim 0)."""

    offset: int
    rows: int
    shape: tuple[int, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part that the rank holds."""
        return (self.rows, *self.shape[1:])


def row_shard(shape: tuple[int, ...], rank: int, world: int, block: int = 1) -> Shard:
    """Split dim 0 evenly over `world` ranks with borders on multiples of `block` rows.

    The leading ranks get one block more when the blocks do not divide; a rank may get no row at all. With block = 128
    no 128x128 scale block is ever cut in two.
    """
    blocks = -(-shape[0] // block)
    share, extra = divmod(blocks, world)
    start = rank * share + min(rank, extra)
    stop = start + share + (rank < extra)
    offset, end = min(start * block, shape[0]), min(stop * block, shape[0])
    return Shard(offset, end - offset, tuple(shape))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, as bytes."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of data in `tensors`, header not counted."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write contiguous CPU `tensors` to `path`, fsync it, and return {"bytes": size, "sha256": hex digest}.

    Raises:
        OSError: whatever the file system says (no room, no permission); the caller knows what it was doing.
    """
    # Widest elements come before narrow ones, so that every tensor starts on a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        size = tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    digest = hashlib.sha256()
    with path.open("wb") as file:
        head = memoryview(struct.pack("<Q", len(text)) + text)
        for piece in (head, *(raw_bytes(tensors[name]) for name in order)):
            for start in range(0, len(piece), CHUNK):
                part = piece[start : start + CHUNK]
                file.write(part)
                digest.update(part)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


class ShardFile:
    """Reads tensors, whole or by rows, from a safetensors file whose sha256 has been checked already.

    Raises:
        InputError: the file is no safetensors file, or lacks a tensor that is asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                self.header: dict[str, Any] = json.loads(file.read(length))
        except (OSError, struct.error, ValueError, MemoryError, OverflowError) as error:
            raise InputError(f"not a readable safetensors file: {error}", str(path)) from error
        self.header.pop("__metadata__", None)
        self.start = 8 + length

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)

    def record(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """dtype and shape of a tensor in this file."""
        if name not in self.header:
            raise InputError(f"tensor '{name}' is missing", str(self.path))
        return DTYPES[self.header[name]["dtype"]], tuple(self.header[name]["shape"])

    def read_rows(self, name: str, first: int, into: Tensor) -> None:
        """Fill `into` (contiguous, CPU) with its number of rows of `name`, starting at row `first` of this file.

        A tensor without dimensions counts as one row.
        """
        dtype, shape = self.record(name)
        width = into.element_size()
        for extent in shape[1:]:
            width *= extent
        if dtype != into.dtype or shape[1:] != tuple(into.shape[1:]):
            raise InputError(f"tensor '{name}' is {dtype} {list(shape)}, not what the manifest says", str(self.path))
        target = raw_bytes(into)
        if not target:
            return
        with self.path.open("rb") as file:
            file.seek(self.start + self.header[name]["data_offsets"][0] + first * width)
            if file.readinto(target) != len(target):
                raise InputError(f"the file ends inside tensor '{name}'", str(self.path))
