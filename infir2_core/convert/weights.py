"""Weights under their Hugging Face names, read by rows, whatever the format they lie in.

`open_weights` finds out what a folder is. What converts, exports and compares sees only `Weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.hf_config import shape_from_hf
from ..config.schema import ModelShape
from ..config.source import CHECKPOINTS, CONFIG, MANIFEST, open_native
from ..errors import InputError
from ..train.manifest import check_hashes, read_manifest
from ..train.shards import DTYPES, ShardFile
from .folder import HFFolder, open_folder, tensor_shapes
from .safefile import Reader
from .streams import check_finite

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


class NativeWeights:
    """The masters of a native checkpoint, written by any number of ranks; every file is hashed when it is opened."""

    kind = "native"

    def __init__(self, path: Path, shape: ModelShape) -> None:
        self.path, self.shape = path, shape
        self.content = read_manifest(path)
        records, expected = self.content["tensors"], tensor_shapes(shape)
        for name, wanted in expected.items():
            record = records.get(f"model/{name}")
            if record is None:
                raise InputError(f"the checkpoint has no tensor 'model/{name}'", str(path / MANIFEST))
            if tuple(record["shape"]) != wanted:
                raise InputError(f"'{name}' is {record['shape']}, its model needs {list(wanted)}", str(path / MANIFEST))
        self._records = {name: records[f"model/{name}"] for name in expected}
        self.tensors: Layout = {name: (DTYPES[r["dtype"]], tuple(r["shape"])) for name, r in self._records.items()}
        names = sorted({part["file"] for record in self._records.values() for part in record["parts"]})
        check_hashes(path, self.content, names)
        self._files = {name: ShardFile(path / name) for name in names}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """As `Weights.rows`."""
        dtype, shape = self.tensors[name]
        rows = torch.empty((count, *shape[1:]), dtype=dtype)
        for part in self._records[name]["parts"]:
            start, stop = max(first, part["offset"]), min(first + count, part["offset"] + part["rows"])
            if start < stop:
                file = self._files[part["file"]]
                file.read_rows(f"model/{name}", start - part["offset"], rows[start - first : stop - first])
        check_finite(rows, name, str(self.path), first)
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
