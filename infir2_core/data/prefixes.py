"""Corpora on disk: what a prefix names, and whether PREFIX.bin, PREFIX.idx and PREFIX.json can be trained on.

Megatron's own reader checks little and fails late (an assertion, or a crash in the middle of a run), so everything that
can be wrong with a corpus is looked for here, with NumPy alone, before Megatron sees it. Nothing is written.
"""

from __future__ import annotations

import glob
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infir2_core.errors import InputError, nearest

HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
REMAKE = "make it again with: infir2 data prepare SOURCE --out PREFIX"


@dataclass(frozen=True)
class Index:
    """PREFIX.idx, checked: `lengths_N` (int32) tokens of each of N sequences, and the stored token dtype.

    Megatron allows several sequences in a document; `documents` counts documents.
    """

    prefix: str
    dtype: np.dtype[Any]
    lengths_N: np.ndarray
    documents: int

    @property
    def tokens(self) -> int:
        return int(self.lengths_N.sum(dtype=np.int64))

    def token_array(self) -> np.ndarray:
        """All token ids, mapped from PREFIX.bin."""
        return np.memmap(f"{self.prefix}.bin", self.dtype, "r", shape=(self.tokens,))


def strip_suffix(prefix: str) -> str:
    """`prefix` without a .bin or .idx suffix."""
    return prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix


def expand_prefixes(spec: str) -> list[str]:
    """The corpora `spec` names: one prefix (with or without .bin/.idx), a glob over prefixes, or "@list.txt".

    Raises:
        InputError: nothing there matches, or the list cannot be read.
    """
    return [prefix for _, prefix in _expand(spec)]


def expand_blend(blend: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """(weight, spec) pairs to (weight, prefix) pairs.

    Within one spec the weight is shared in proportion to tokens, so every document of the group is equally likely; a
    list file that gives weights of its own shares it by those.

    Raises:
        InputError: as `expand_prefixes` and `read_index`.
    """
    flat = []
    for weight, spec in blend:
        group = _expand(spec)
        shares = [float(read_index(prefix).tokens) if own is None else own for own, prefix in group]
        flat += [(weight * share / sum(shares), prefix) for share, (_, prefix) in zip(shares, group, strict=True)]
    return flat


def _expand(spec: str) -> list[tuple[float | None, str]]:
    if spec.startswith("@"):
        return _read_list(Path(spec[1:]).expanduser())
    path = os.path.expanduser(spec)
    if not glob.has_magic(path):
        return [(None, strip_suffix(path))]
    # A pattern such as data/web/* also matches .json and .parts; a prefix is what has an index.
    found = sorted(
        {
            strip_suffix(name)
            for pattern in (path, f"{path}.idx")
            for name in glob.glob(pattern)
            if name.endswith((".bin", ".idx"))
        }
    )
    if not found:
        raise InputError(
            f"no corpus matches {spec}",
            "--data",
            "a corpus is PREFIX.bin and PREFIX.idx; make one with: infir2 data prepare",
        )
    return [(None, prefix) for prefix in found]


def _read_list(path: Path) -> list[tuple[float | None, str]]:
    """Lines of `PREFIX [WEIGHT]`; # starts a comment; relative prefixes are relative to the list's own folder."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read this list: {error}", str(path), "give @FILE with one prefix a line") from None
    entries: list[tuple[float | None, str]] = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        weight = None
        if len(words) > 1:
            try:
                weight = float(words[1])
            except ValueError:
                weight = 0.0
        if len(words) > 2 or (weight is not None and not 0 < weight < float("inf")):
            raise InputError(
                "a line is a prefix and, if wanted, a positive weight",
                f"{path}, line {number}",
                f"this one is: {line.strip()}",
            )
        entries.append((weight, strip_suffix(str(path.parent / Path(words[0]).expanduser()))))
    if not entries:
        raise InputError("this list names no corpus", str(path), "write one prefix a line")
    weighted = [weight is not None for weight, _ in entries]
    if any(weighted) and not all(weighted):
        raise InputError("some lines have a weight and some have none", str(path), "give every line a weight, or none")
    return entries


def read_index(prefix: str) -> Index:
    """Read and check PREFIX.idx and the size of PREFIX.bin.

    Raises:
        InputError: a file is missing or unreadable, the index is broken, the corpus is empty, .bin does not fit .idx.
    """
    idx, data = f"{prefix}.idx", f"{prefix}.bin"
    for path in (idx, data):
        if not os.path.isfile(path):
            raise InputError(f"no such file: {path}", prefix, _near_prefixes(prefix))
        if not os.access(path, os.R_OK):
            raise InputError("no permission to read this file", path, f"chmod u+r {path}")
    size = os.path.getsize(idx)
    with open(idx, "rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise InputError("not a Megatron index", idx, REMAKE)
    _, version, code, sequences, borders = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise InputError(f"a Megatron index of an unknown kind (version {version}, type {code})", idx, REMAKE)
    if sequences == 0:
        raise InputError("this corpus is empty", prefix, REMAKE)
    expected = HEADER.size + 12 * sequences + 8 * borders
    if size != expected:
        raise InputError(f"damaged index: {size:,} bytes where its header asks for {expected:,}", idx, REMAKE)
    whole = np.memmap(idx, np.uint8, "r")
    lengths = whole[HEADER.size :][: 4 * sequences].view(np.int32)
    starts = whole[HEADER.size + 4 * sequences :][: 8 * sequences].view(np.int64)
    ends = whole[HEADER.size + 12 * sequences :].view(np.int64)
    dtype = np.dtype(DTYPES[code])
    filled = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    sound = (
        lengths.min() >= 0
        and borders >= 2
        and ends[0] == 0
        and ends[-1] == sequences
        and bool((np.diff(ends) >= 0).all())
    )
    if not sound or starts[0] != 0 or not np.array_equal(starts[1:], filled[:-1]):
        raise InputError("damaged index: its lengths and offsets contradict each other", idx, REMAKE)
    have, want = os.path.getsize(data), int(filled[-1])
    if want == 0:
        raise InputError("this corpus is empty", prefix, REMAKE)
    if have != want:
        what = (
            f"truncated: {want - have:,} bytes missing" if have < want else f"too long: {have - want:,} bytes too many"
        )
        raise InputError(
            f"{what} ({have:,} where {idx} asks for {want:,})", data, "copy both files again, or " + REMAKE
        )
    return Index(prefix, dtype, lengths, borders - 1)


def _near_prefixes(prefix: str) -> str:
    folder = os.path.dirname(prefix) or "."
    there = (
        [strip_suffix(name) for name in os.listdir(folder) if name.endswith(".idx")] if os.path.isdir(folder) else []
    )
    return (
        nearest(os.path.basename(prefix), there)
        if there
        else "make one with: infir2 data prepare python-stdlib --out " + prefix
    )


def describe_prefix(prefix: str) -> dict[str, Any]:
    """What is known of a corpus: prefix, documents, tokens, bytes, dtype, and `made` (PREFIX.json, or None).

    `made` holds tokenizer {ref, size, digest, eod}, max_id, content, skipped and sources, as prepare.py wrote them.

    Raises:
        InputError: as `read_index`; or PREFIX.json is damaged or belongs to other files.
    """
    index = read_index(prefix)
    facts = {"prefix": prefix, "documents": index.documents, "tokens": index.tokens, "dtype": index.dtype.name}
    return {**facts, "bytes": index.tokens * index.dtype.itemsize, "made": _made(index)}


def _made(index: Index) -> dict[str, Any] | None:
    path = Path(f"{index.prefix}.json")
    if not path.is_file():
        return None
    try:
        made: dict[str, Any] = json.loads(path.read_text())
        fits = made["tokens"] == index.tokens and made["documents"] == index.documents
        made["tokenizer"]["size"], made["max_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"damaged: {error!r}", str(path), "delete it, or " + REMAKE) from None
    if not fits:
        raise InputError(
            "this file describes another corpus than the .bin and .idx beside it", str(path), "delete it, or " + REMAKE
        )
    return made


def check_prefixes(prefixes: Sequence[str], vocab: int) -> None:
    """Refuse corpora that cannot be trained on by a model whose embedding has `vocab` rows.

    Raises:
        InputError: as `read_index`; ids or tokenizer larger than `vocab`; corpora made with different tokenizers.
    """
    if not prefixes:
        raise InputError(
            "no training data given", "--data", "make some: infir2 data prepare python-stdlib --out data/stdlib"
        )
    digests: dict[str, str] = {}
    for prefix in prefixes:
        index = read_index(prefix)
        made = _made(index)
        if made is None:
            lowest, highest = _id_range(index)
            size, ref = highest + 1, ""
            if lowest < 0:
                raise InputError(f"negative token id {lowest}", f"{prefix}.bin", REMAKE)
        else:
            size, ref = made["tokenizer"]["size"], made["tokenizer"]["ref"]
            digests.setdefault(made["tokenizer"]["digest"], prefix)
        if size > vocab:
            made_with = f"the tokenizer {ref} has {size:,} ids" if ref else f"ids go up to {size - 1:,}"
            raise InputError(
                f"{made_with}, but the model's vocabulary has {vocab:,}",
                prefix,
                "prepare the data with the model's own tokenizer (data prepare --tokenizer), or choose another --size",
            )
    if len(digests) > 1:
        raise InputError(
            "these corpora were made with different tokenizers",
            ", ".join(digests.values()),
            "prepare them with one tokenizer",
        )


def _id_range(index: Index) -> tuple[int, int]:
    ids, step = index.token_array(), 1 << 24
    pieces = [ids[i : i + step] for i in range(0, len(ids), step)]
    return min(int(p.min()) for p in pieces), max(int(p.max()) for p in pieces)
