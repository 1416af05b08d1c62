"""A torch_dist checkpoint: which tensors it holds, in which pieces, and rows of any of them.

    .metadata            pickle: tensors with their global shapes, pieces, and the file, offset and length of each
    __RANK_N.distcp      one torch.save archive after another
    common.pt            common state (arguments, iteration ...); newer versions keep it as an object among the pieces
    metadata.json        says that it is torch_dist

Any tensor and pipeline parallelism may have written it: pieces are put together by their offsets.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...train.shards import raw_bytes
from .archive import AGAIN, Archive, StoredTensor
from .pickles import Inert, read_pickle

METADATA, CONFIG, TRACKER = ".metadata", "metadata.json", "latest_checkpointed_iteration.txt"
COMMON_FILE, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class DistTensor:
    """A tensor of the checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def find_iteration(folder: Path, where: str) -> Path:
    """The folder of one iteration: `folder` itself, or the one that its tracker file names.

    Raises:
        InputError: neither, or a checkpoint of Megatron's older format (with the command that converts it).
    """
    if not folder.exists():
        raise InputError("there is no such path", f"{where}: {folder}", "check the path")
    if (folder / METADATA).is_file():
        return folder
    if (folder / TRACKER).is_file():
        text = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
        number = re.fullmatch(r"[0-9]{1,18}", text)
        name = "release" if text == "release" else f"iter_{int(text):07d}" if number else ""
        if not name or not (folder / name).is_dir():
            raise InputError(f"{TRACKER} says '{text[:40]}', and there is no such folder", str(folder))
        folder = folder / name
        if (folder / METADATA).is_file():
            return folder
    if (older := _older(folder)) is not None:
        load = shlex.quote(str(older.parent))
        command = f"--ckpt-format torch --load {load} --ckpt-convert-format torch_dist --ckpt-convert-save OUT"
        hint = f"with Megatron-LM, your own launch command and: {command}"
        raise InputError("this is a checkpoint of Megatron's older format (mp_rank_*)", f"{where}: {folder}", hint)
    raise InputError("this is no torch_dist checkpoint: it has no .metadata", f"{where}: {folder}", "give iter_NNNNNNN")


def is_megatron(folder: Path) -> bool:
    """Whether a folder looks like a checkpoint of Megatron, of any format."""
    return (folder / METADATA).is_file() or (folder / TRACKER).is_file() or _older(folder) is not None


def _older(folder: Path) -> Path | None:
    """The iteration folder of Megatron's older format that `folder` is or lies in, as an absolute path."""
    absolute = Path(os.path.abspath(folder))  # links stay as they are
    if absolute.name.startswith("mp_rank_") and folder.is_dir():
        return absolute.parent
    return absolute if any(folder.glob("mp_rank_*")) else None


def _extents(value: Any) -> tuple[int, ...]:
    """A size or offset of the metadata."""
    found = tuple(value)
    if not all(type(item) is int and item >= 0 for item in found):
        raise ValueError(f"{found} is no size")
    return found


class DistCheckpoint:
    """An iteration folder, opened.

    Attributes:
        tensors: by name.
        objects: names of what is stored as pickles (FP8 extra state, random states ...).
        common: the common state as read by the restricted reader; empty when there is none.
        placeholders: how often each name was met that is no plain data.

    Raises:
        InputError: a damaged or missing file, or a format that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.placeholders: Counter[str] = Counter()
        self._check_format()
        try:
            data = (path / METADATA).read_bytes()
        except OSError as error:
            raise InputError(f"the metadata cannot be read: {error.strerror}", str(path / METADATA)) from error
        metadata = read_pickle(data, str(path / METADATA))
        try:
            self._stored = self._storage(metadata.get("storage_data"))
            self.tensors = self._tensors(metadata.get("state_dict_metadata"))
            names = metadata.get("state_dict_metadata")
        except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
            raise InputError(f"the metadata is of a kind that is not known: {error}", str(path / METADATA)) from error
        self.objects = sorted(name for name in names if name not in self.tensors)
        self.common = self._common()
        self._opened: dict[Piece, StoredTensor] = {}
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def _check_format(self) -> None:
        file = self.path / CONFIG
        if not file.is_file():
            return
        try:
            backend = json.loads(file.read_text(encoding="utf-8")).get("sharded_backend")
        except (ValueError, AttributeError) as error:
            raise InputError(f"{CONFIG} cannot be read: {error}", str(file)) from error
        if backend != "torch_dist":
            what = f"the checkpoint's format is '{backend}'; torch_dist is read"
            raise InputError(what, str(file), "load it with Megatron-LM and save it with --ckpt-format torch_dist")

    def _storage(self, stored: dict[Inert, Inert]) -> dict[tuple[str, tuple[int, ...] | None], Inert]:
        """(name, offsets or None) -> the record of the piece."""
        return {(index.get("fqn"), index.get("offset")): info for index, info in stored.items()}

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> tuple[Path, int, int]:
        info = self._stored[name, offsets]
        file = str(info.get("relative_path"))
        if Path(file).name != file:
            raise InputError(f"a piece of '{name}' lies outside the folder: {file}", str(self.path / METADATA))
        if info.get("transform_descriptors"):
            raise InputError(f"'{name}' is packed, which is not read", str(self.path / file))
        return self.path / file, int(info.get("offset")), int(info.get("length"))

    def _tensors(self, described: dict[str, Inert]) -> dict[str, DistTensor]:
        found = {}
        for name, record in described.items():
            if not record.origin.endswith(".TensorStorageMetadata"):
                continue
            properties = record.get("properties")
            dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
            size, pieces = _extents(record.get("size")), []
            for chunk in record.get("chunks"):
                offsets, sizes = _extents(chunk.get("offsets")), _extents(chunk.get("sizes"))
                if not len(offsets) == len(sizes) == len(size):
                    raise ValueError(f"pieces of '{name}' have other dimensions than it has")
                if math.prod(sizes):
                    pieces.append(Piece(offsets, sizes, *self._place(name, offsets)))
            found[name] = DistTensor(name, dtype, size, tuple(pieces))
        return found

    def _common(self) -> dict[str, Any]:
        """Common state of either layout."""
        value: Any = {}
        if (self.path / COMMON_FILE).is_file():
            value = Archive(self.path / COMMON_FILE, seen=self.placeholders).value
        elif (COMMON_OBJECT, None) in self._stored:
            value = Archive(*self._place(COMMON_OBJECT, None), seen=self.placeholders).value
            value = value[0] if isinstance(value, list) and value else value
        return value if isinstance(value, dict) else {}

    @property
    def arguments(self) -> dict[str, Any]:
        """The `args` of the training loop by name; empty when they were not saved."""
        args = self.common.get("args")
        state = args.state if isinstance(args, Inert) else args
        return dict(state) if isinstance(state, dict) else {}

    def rows(self, name: str, layer: int | None, first: int, count: int) -> Tensor:
        """Rows [first, first + count) of a tensor, or of its slice `layer` along dim 0, in its dtype.

        Raises:
            InputError: a piece is missing or damaged.
        """
        tensor = self.tensors[name]
        lead = () if layer is None else (layer,)
        shape = tensor.shape[len(lead) :]
        out = torch.empty((count, *shape[1:]), dtype=tensor.dtype)
        filled = 0
        for piece in tensor.pieces:
            if lead and not piece.offsets[0] <= lead[0] < piece.offsets[0] + piece.sizes[0]:
                continue
            offsets, sizes = piece.offsets[len(lead) :], piece.sizes[len(lead) :]
            start, stop = max(first, offsets[0]), min(first + count, offsets[0] + sizes[0])
            if start >= stop:
                continue
            skipped = (lead[0] - piece.offsets[0]) * math.prod(sizes) if lead else 0
            part = self._read(tensor, piece, skipped, sizes, start - offsets[0], stop - start)
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
            out[(slice(start - first, stop - first), *box)] = part
            filled += part.numel()
        if filled != out.numel():
            raise InputError(f"rows of '{name}' are in no piece of the checkpoint", str(self.path / METADATA))
        return out

    def _read(
        self, tensor: DistTensor, piece: Piece, skipped: int, sizes: tuple[int, ...], first: int, count: int
    ) -> Tensor:
        """`count` rows of a piece, `skipped` elements and `first` rows into it."""
        with self._lock:
            stored = self._opened.get(piece)
            if stored is None:
                archive = Archive(piece.file, piece.offset, piece.length)
                stored = self._opened[piece] = archive.tensor(archive.value, tensor.name)
                if math.prod(stored.shape) != math.prod(piece.sizes) or stored.dtype != tensor.dtype:
                    what = f"a piece of '{tensor.name}' is {stored.dtype} {list(stored.shape)}, its metadata says "
                    raise InputError(what + f"{tensor.dtype} {list(piece.sizes)}", str(piece.file))
            if piece.file not in self._files:
                self._files[piece.file] = os.open(piece.file, os.O_RDONLY)
            descriptor = self._files[piece.file]
        rows = torch.empty((count, *sizes[1:]), dtype=tensor.dtype)
        place = stored.start + (skipped + first * math.prod(sizes[1:])) * tensor.dtype.itemsize
        target, read = raw_bytes(rows), 0
        while read < len(target):
            got = os.preadv(descriptor, [target[read:]], place + read)
            if got == 0:
                raise InputError(f"the file ends inside '{tensor.name}'", str(piece.file), AGAIN)
            read += got
        return rows

    def close(self) -> None:
        """Let go of open files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
