"""Pickles read without constructing anything they ask for.

A torch_dist checkpoint keeps its metadata and its common state as pickles, which name classes and functions to call.
Here every name but a few harmless ones becomes an `Inert`: a record of the name, the arguments it was called with and
the state it was given. Nothing of the checkpoint's choosing is imported or run, so classes of other packages, enums
and whatever else a training loop kept are no obstacle either.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ...errors import InputError

# Values, not behaviour: making one of these runs no code that a file could choose.
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("torch", "Size"): tuple,
}


class Inert:
    """What a pickle asked to be made, as data.

    Attributes:
        origin: dotted name of the class or function (on the class).
        args: what it was called with.
        state: what `__setstate__` would have got; None when nothing was.
        items: what would have been appended or set.
    """

    origin = ""
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **keywords: Any) -> Inert:
        made = object.__new__(cls)
        made.args, made.state, made.items = args, keywords or None, []
        return made

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Everything is done by `__new__`, which is all that some opcodes call."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        raise TypeError("a placeholder cannot be pickled")

    def append(self, item: Any) -> None:
        """A list-like class gets an item."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """A list-like class gets several items."""
        self.items.extend(items)

    def add(self, item: Any) -> None:
        """A set-like class gets an item."""
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the object that was pickled."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return state.get(name, default) if isinstance(state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.origin}>"


def _latin(text: str, encoding: str = "latin1") -> bytes:
    """`_codecs.encode`, by which old protocols write bytes."""
    return text.encode("latin1") if encoding in ("latin1", "latin-1") else b""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, seen: Counter[str]) -> None:
        super().__init__(file)
        self._seen, self._made = seen, {}  # type: ignore[var-annotated]

    def find_class(self, module: str, name: str) -> Any:
        """The value that stands for a global name; never what is behind it."""
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) == ("_codecs", "encode"):
            return _latin
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        origin = f"{module}.{name}"
        self._seen[origin] += 1
        if origin not in self._made:
            self._made[origin] = type(name.split(".")[-1] or "Inert", (Inert,), {"origin": origin})
        return self._made[origin]

    def persistent_load(self, pid: Any) -> Any:
        """A storage of torch.save, as the tuple that names it."""
        return Storage(pid)

    def get_extension(self, code: int) -> Any:
        """Extension codes are a registry of the process that wrote the file."""
        raise pickle.UnpicklingError(f"extension code {code}")


class Storage:
    """A reference to a tensor's bytes: `type` (name of the storage class), `key` in the archive, `numel`."""

    def __init__(self, pid: Any) -> None:
        kind, cls, key, _, numel = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"persistent id of kind {kind!r}")
        self.type, self.key, self.numel = getattr(cls, "origin", str(cls)), str(key), int(numel)


def read_pickle(data: bytes, where: str, seen: Counter[str] | None = None) -> Any:
    """The value of a pickle, with `Inert` in place of whatever is no plain data.

    Args:
        seen: counts the names of what became inert.

    Raises:
        InputError: not a pickle, or one that is cut off or nests too deeply.
    """
    try:
        return _Unpickler(io.BytesIO(data), Counter() if seen is None else seen).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise InputError(f"the pickle cannot be read: {error}", where, "copy the checkpoint again") from error
    except (RecursionError, MemoryError, OverflowError, UnicodeDecodeError) as error:
        raise InputError(f"the pickle makes no sense: {type(error).__name__}", where) from error


def plain(value: Any, note: Callable[[str], None] = lambda name: None, depth: int = 0) -> Any:
    """`value` as JSON-like data: inert objects become their name in angle brackets and are noted."""
    if depth > 20:
        return "..."
    if isinstance(value, Inert):
        if value.origin == "argparse.Namespace" and isinstance(value.state, dict):
            return {key: plain(item, note, depth + 1) for key, item in value.state.items()}
        note(value.origin)
        return repr(value)
    if isinstance(value, dict):
        return {str(key): plain(item, note, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, note, depth + 1) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
