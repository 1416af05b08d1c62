"""What torch.save wrote, read from its place inside another file: the pickle by the restricted reader, tensor bytes by
their offset.

The archive is a zip whose members are stored, not packed, so that rows of a tensor can be read without the rest.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError
from .pickles import Inert, Storage, read_pickle

_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.DoubleStorage": torch.float64,
    "torch.ByteStorage": torch.uint8,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.storage.UntypedStorage": torch.uint8,
}

AGAIN = "copy the checkpoint again"


@dataclass(frozen=True)
class StoredTensor:
    """A contiguous tensor: dtype, shape and the byte in the file at which it starts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class _Window(io.RawIOBase):
    """The bytes [offset, offset + length) of a file as a file of its own."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = path.open("rb")
        self._offset, self._length, self._position = offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, self._length)[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._position)
        data = self._file.read(min(len(buffer), max(0, self._length - self._position)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


# What zipfile raises on damaged archives; RuntimeError where one claims to be encrypted.
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, KeyError, EOFError, RuntimeError, UnicodeDecodeError)


class Archive:
    """One torch.save archive at [offset, offset + length) of a file.

    Raises:
        InputError: there is no such archive there, it is cut off, packed, or of another byte order.
    """

    def __init__(
        self, path: Path, offset: int = 0, length: int | None = None, seen: Counter[str] | None = None
    ) -> None:
        self.path, self._offset = path, offset
        try:
            size = path.stat().st_size
            length = size - offset if length is None else length
            if offset + length > size:
                what = f"the file is truncated: {size} bytes, {offset + length} are needed"
                raise InputError(what, str(path), AGAIN)
            with _Window(path, offset, length) as window, zipfile.ZipFile(window) as archive:
                self._members = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
                order = archive.read(self._members["byteorder"]) if "byteorder" in self._members else b"little"
                data = archive.read(self._members["data.pkl"])
        except OSError as error:
            raise InputError(f"the file cannot be read: {error.strerror}", str(path)) from error
        except _DAMAGE as error:
            hint = "copy the checkpoint again; archives of torch before 1.6 are not read"
            raise InputError(f"no archive of torch.save at byte {offset}: {error}", str(path), hint) from error
        if order.strip() != b"little":
            raise InputError("the archive was written on a machine of another byte order", str(path))
        self.value = read_pickle(data, str(path), seen)

    def tensor(self, value: Any, name: str) -> StoredTensor:
        """Where the bytes of a pickled tensor are.

        Raises:
            InputError: the value is no tensor, or one that is packed, strided or of an unknown dtype.
        """
        while isinstance(value, Inert) and value.origin == "torch._utils._rebuild_parameter" and value.args:
            value = value.args[0]
        origin = value.origin if isinstance(value, Inert) else type(value).__name__
        if origin not in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            what = f"the weight '{name}' is stored as {origin}, which is not read: only plain tensors are"
            raise InputError(what, str(self.path), "save the checkpoint with its weights in bf16 or fp32")
        needed = 7 if origin.endswith("v3") else 4
        storage, offset, shape, stride = value.args[:4] if len(value.args) >= needed else (None, -1, (), ())
        if not (_counts((offset,)) and _counts(shape) and _counts(stride) and len(shape) == len(stride)):
            what = f"the weight '{name}' is damaged: its place in the file is not what torch.save writes"
            raise InputError(what, str(self.path), AGAIN)
        dtype = value.args[6] if needed == 7 else _STORAGES.get(getattr(storage, "type", ""))
        if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
            raise InputError(f"the weight '{name}' has a dtype that is not known", str(self.path))
        shape, expected = tuple(shape), 1
        for extent, step in zip(reversed(shape), reversed(tuple(stride)), strict=True):
            if extent != 1 and step != expected:
                raise InputError(f"the weight '{name}' is not stored row by row", str(self.path))
            expected *= extent
        info = self._members.get(f"data/{storage.key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise InputError(f"the bytes of the weight '{name}' are missing or packed", str(self.path))
        if (offset + expected) * dtype.itemsize > info.file_size:
            raise InputError(f"the bytes of the weight '{name}' are cut off", str(self.path), AGAIN)
        with self.path.open("rb") as file:
            file.seek(self._offset + info.header_offset + 26)
            names, extra = struct.unpack("<HH", file.read(4))
        start = self._offset + info.header_offset + 30 + names + extra
        return StoredTensor(dtype, shape, start + offset * dtype.itemsize)


def _counts(value: Any) -> bool:
    """Whether a pickled value is a sequence of integers that are not negative."""
    return isinstance(value, tuple | list) and all(type(item) is int and item >= 0 for item in value)
