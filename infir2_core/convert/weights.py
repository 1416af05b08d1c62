"""Weights under their Hugging Face names, read by rows, whatever the format they lie in.

`open_weights` finds out what a folder is. What converts, exports and compares sees only `Weights`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.hf_config import shape_from_hf
from ..config.schema import ModelShape
from ..config.source import CHECKPOINTS, CONFIG, MANIFEST, open_native
from ..errors import InputError
from ..ops.reference.moments import join
from ..train.manifest import check_hashes, read_manifest
from ..train.shards import DTYPES, ShardFile
from .folder import FLOATS, HFFolder, open_folder, tensor_shapes
from .safefile import Reader
from .streams import Strip, check_finite, strips

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Weights(Protocol):
    """A model's tensors.

    Attributes:
        path: the folder.
        kind: `hf`, `native` or `megatron`.
        shape: architecture.
        tensors: Hugging Face name -> stored dtype and shape, in the order of the layers.
    """

    path: Path
    kind: str
    shape: ModelShape
    tensors: Layout

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows [first, first + count) of a tensor, as stored, on the CPU; may be called from several threads."""

    def identity(self) -> dict[str, Any]:
        """JSON values that change when the weights do."""

    def close(self) -> None:
        """Let go of open files."""


class HFWeights:
    """A Hugging Face folder of bf16, fp16 or fp32 weights; a tied head that was written anyway is passed over.

    Args:
        trained: training will start from it, so that variants which the decoder does not compute are refused.
    """

    kind = "hf"

    def __init__(self, path: Path, trained: bool = False) -> None:
        self.folder: HFFolder = open_folder(path)
        if method := self.folder.quantization.get("quant_method"):
            raise InputError(f"the model is quantised ({method})", str(path), "give the bf16 model instead")
        if trained:
            shape_from_hf(self.folder.config, str(path / "config.json"))
        self.path, self.shape = path, self.folder.shape
        self._entries = {name: self.folder.entries[name] for name in tensor_shapes(self.shape)}
        for name, entry in self._entries.items():
            if entry.dtype not in FLOATS:
                what = f"'{name}' has dtype {entry.dtype}, expected bf16, fp16 or fp32"
                raise InputError(what, str(entry.file), "give the bf16 model instead")
        self.tensors: Layout = {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}
        self._readers = {file: Reader(file) for file in {entry.file for entry in self._entries.values()}}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """As `Weights.rows`."""
        entry = self._entries[name]
        rows = self._readers[entry.file].rows(entry, first, count)
        check_finite(rows, name, str(entry.file), first)
        return rows

    def identity(self) -> dict[str, Any]:
        """Size and time of change of each file."""
        status = {file: file.stat() for file in self._readers}
        return {file.name: [found.st_size, found.st_mtime_ns] for file, found in status.items()}

    def close(self) -> None:
        """As `Weights.close`."""
        for reader in self._readers.values():
            reader.__exit__(None, None, None)


def spans(tensors: Layout, names: Iterable[str]) -> Iterator[tuple[str, Strip]]:
    """The strips of the named tensors, one tensor after the other."""
    for name in names:
        dtype, shape = tensors[name]
        width = math.prod(shape[1:])
        for strip in strips(shape[0], width, width * dtype.itemsize):
            yield name, strip


def stored_bytes(tensors: Layout, dtype: torch.dtype | None = None) -> int:
    """Bytes of all tensors, in `dtype` or as they are stored."""
    return sum(math.prod(shape) * (dtype or stored).itemsize for stored, shape in tensors.values())


def rows_as(weights: Weights, name: str, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Rows of a tensor for a use in `dtype`: in bf16, the weights that training computed with where they are kept."""
    if dtype is torch.bfloat16 and isinstance(weights, NativeWeights):
        halves = weights.halves(name, first, count)
        if halves is not None:
            return halves
    return weights.rows(name, first, count)


def _whole(key: str, record: dict[str, Any], wanted: tuple[int, ...], where: str) -> None:
    """Refuses a record of another shape, and parts that leave rows out or hold them twice."""
    if tuple(record["shape"]) != wanted:
        raise InputError(f"'{key}' is {record['shape']}, its model needs {list(wanted)}", where)
    position = 0
    for part in sorted(record["parts"], key=lambda part: int(part["offset"])):
        if part["offset"] != position:
            raise InputError(f"'{key}' has no row {position}, or has it twice", where, "use another checkpoint")
        position += part["rows"]
    if position != wanted[0]:
        raise InputError(f"'{key}' has {position} rows of {wanted[0]}", where, "use another checkpoint")


class NativeWeights:
    """The masters of a native checkpoint, written by any number of ranks; every file is hashed when it is opened.

    A master that is split (ops/reference/moments.py) is put together again; `halves` are the bf16 weights that training
    computed with, which are the master rounded to nearest with halfway cases away from zero.
    """

    kind = "native"

    def __init__(self, path: Path, shape: ModelShape) -> None:
        self.path, self.shape = path, shape
        self.content = read_manifest(path)
        records, expected = self.content["tensors"], tensor_shapes(shape)
        for name in expected:
            record = records.get(f"model/{name}")
            if record is None:
                raise InputError(f"the checkpoint has no tensor 'model/{name}'", str(path / MANIFEST))
        kinds = ("model", "remainder")
        self._records = {key: records[key] for n in expected for kind in kinds if (key := f"{kind}/{n}") in records}
        for key, record in self._records.items():
            _whole(key, record, expected[key.partition("/")[2]], str(path / MANIFEST))
        self.tensors: Layout = {
            name: (torch.float32 if self._split(name) else DTYPES[records[f"model/{name}"]["dtype"]], wanted)
            for name, wanted in expected.items()
        }
        names = sorted({part["file"] for record in self._records.values() for part in record["parts"]})
        check_hashes(path, self.content, names)
        self._files = {name: ShardFile(path / name) for name in names}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """As `Weights.rows`."""
        rows = self._stored(f"model/{name}", first, count)
        if self._split(name):
            rows = join(rows, self._stored(f"remainder/{name}", first, count))
        check_finite(rows, name, str(self.path), first)
        return rows

    def halves(self, name: str, first: int, count: int) -> Tensor | None:
        """The bf16 half of a split master; None of one that is whole."""
        if not self._split(name):
            return None
        rows = self._stored(f"model/{name}", first, count)
        check_finite(rows, name, str(self.path), first)
        return rows

    def _split(self, name: str) -> bool:
        return f"remainder/{name}" in self._records

    def _stored(self, key: str, first: int, count: int) -> Tensor:
        record = self._records[key]
        rows = torch.empty((count, *record["shape"][1:]), dtype=DTYPES[record["dtype"]])
        for part in record["parts"]:
            start, stop = max(first, part["offset"]), min(first + count, part["offset"] + part["rows"])
            if start < stop:
                file = self._files[part["file"]]
                file.read_rows(key, start - part["offset"], rows[start - first : stop - first])
        return rows

    def identity(self) -> dict[str, Any]:
        """The hash of each file."""
        return {name: record["sha256"] for name, record in self.content["files"].items()}

    def close(self) -> None:
        """As `Weights.close`."""


def open_weights(folder: Path, where: str, origin: ModelShape | None = None) -> Weights:
    """The weights in a Hugging Face folder, a run folder (its newest complete checkpoint), a checkpoint of ours or one
    of Megatron's.

    Args:
        origin: architecture that a checkpoint of Megatron's began as; it settles what the checkpoint leaves open.

    Raises:
        InputError: the folder is none of these, or what it holds is damaged.
    """
    if (folder / MANIFEST).is_file() or ((folder / CONFIG).is_file() and (folder / CHECKPOINTS).is_dir()):
        found = open_native(folder, where)
        return NativeWeights(found.path, found.shape)
    if (folder / "config.json").is_file():
        return HFWeights(folder)
    from .megatron.dist import is_megatron

    if is_megatron(folder):
        from .megatron.weights import MegatronWeights

        return MegatronWeights(folder, where, origin)
    what = f"no weights here: neither config.json (Hugging Face), {MANIFEST} nor {CHECKPOINTS}/ (infir2), nor .metadata"
    raise InputError(what, f"{where}: {folder}", "give a Hugging Face folder, a run or a checkpoint")
