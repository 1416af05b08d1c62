"""Documents to a Megatron corpus: PREFIX.bin (ids), PREFIX.idx (where documents end), PREFIX.json (how it was made).

The work is a list of blocks (sources.py), each named by the hash of its text, the tokenizer and the settings. This
process reads and hashes; others tokenise the blocks nobody has tokenised before and leave each as a part in
PREFIX.parts/ (parts.py). When all are there they are put together in source order. So:

- a run that was killed continues with the parts it finds;
- the same sources, tokenizer and settings again find the same content key and do nothing;
- when one file changed, only its block is tokenised; the others are copied out of the old PREFIX.bin, whose layout
  PREFIX.parts/index.json remembers after the parts themselves are gone;
- the result does not depend on the number of processes.

Each document is followed by the tokenizer's end-of-document id. Nothing is shuffled here: Megatron's dataset draws the
order from the run's seed, and its train/validation/test split takes documents in the order they are stored.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from infir2_core.data.corpus import quiet_megatron
from infir2_core.data.parts import FORMAT, Part, Progress, Settings, Tokenising, drop_parts, read_part
from infir2_core.data.prefixes import strip_suffix
from infir2_core.data.sources import COMPRESSED, SMALLEST, SourceFile, find_files, read_blocks
from infir2_core.data.tokenizer import BYTE, Tokenizer, load_tokenizer
from infir2_core.errors import NO_ROOM, InputError, MachineError


def default_workers() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan(
    sources: Sequence[str], out: str, tokenizer_ref: str, extensions: Iterable[str] = (), limit_mb: float = 0
) -> dict[str, Any]:
    """What `prepare` would read and write, without writing anything.

    Returns:
        prefix, files, bytes (on disk), text_bytes and output_bytes (both estimates), tokenizer.

    Raises:
        InputError: as `find_files` and `load_tokenizer`.
    """
    files, tokenizer, prefix = find_files(sources, extensions), load_tokenizer(tokenizer_ref), as_prefix(out)
    text, output = _estimate(files, tokenizer, limit_mb)
    return {
        "prefix": str(prefix),
        "files": len(files),
        "bytes": sum(f.size for f in files),
        "text_bytes": text,
        "output_bytes": output,
        "tokenizer": describe_tokenizer(tokenizer),
    }


def prepare(
    sources: Sequence[str],
    out: str,
    tokenizer_ref: str = BYTE,
    *,
    text_key: str = "text",
    extensions: Iterable[str] = (),
    workers: int = 0,
    limit_mb: float = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tokenise `sources` into the corpus `out` (.bin, .idx, .json).

    Args:
        sources: files, folders or "python-stdlib"; see sources.py.
        out: prefix of the files to write; a .bin or .idx suffix is dropped.
        tokenizer_ref: see `load_tokenizer`.
        text_key: JSONL key or Parquet column that holds the text.
        extensions: suffixes to take from folders; empty means the usual ones.
        workers: processes that tokenise; 0 means one a processor.
        limit_mb: stop after this many million bytes of text; 0 reads everything.
        progress: called from this process as work is finished.

    Returns:
        The content of PREFIX.json, and: prefix, already (nothing had to be done), tokenised and reused (blocks).

    Raises:
        InputError: sources, tokenizer or output folder are not usable; a JSONL line is bad (names file and line).
        MachineError: no room on disk, a missing package, a worker that was killed.
    """
    tokenizer, files = load_tokenizer(tokenizer_ref), find_files(sources, extensions)
    prefix = as_prefix(out)
    store = Path(f"{prefix}.parts")
    with _file_errors(prefix), _locked(store):
        settings = Settings(tokenizer.location, tokenizer.digest, tokenizer.eod, dtype_for(tokenizer.size), text_key)
        old = _OldCorpus(prefix)
        most = max(1, _estimate(files, tokenizer, limit_mb)[0] // SMALLEST)
        total, processes = sum(f.size for f in files), min(workers or default_workers(), most)
        with Tokenising(store, settings, tokenizer, processes, progress, total) as work:
            skipped = Counter[str]()
            for block in read_blocks(files, text_key, skipped, int(limit_mb * 1e6)):
                key = settings.key(block)
                if key not in old.places and not work.has(key):
                    work.check_room_once(lambda: _check_room(prefix, files, tokenizer, limit_mb))
                    work.submit(key, block)
                work.done(key, block.read)
        content = hashlib.sha256("".join(work.keys).encode()).hexdigest()
        counts = {"tokenised": len(work.submitted), "reused": len(work.keys) - len(work.submitted)}
        if old.facts.get("content") == content:
            drop_parts(store)
            facts = {**old.facts, "tokenizer": describe_tokenizer(tokenizer)}  # the same one may have moved
            if facts != old.facts:
                _write_json(Path(f"{prefix}.json"), facts, indent=2)
            return {**facts, "prefix": str(prefix), "already": True, **counts}
        facts = _write(prefix, store, work.keys, old, settings, progress)
        if not facts["documents"]:
            for suffix in (".bin", ".idx"):
                Path(f"{prefix}{suffix}.aside").unlink()
            raise InputError("the sources hold no text", ", ".join(sources), "give files with text")
        facts = {
            "format": FORMAT,
            "tokenizer": describe_tokenizer(tokenizer),
            **facts,
            "content": content,
            "skipped": dict(sorted((skipped + Counter(facts["skipped"])).items())),
            "sources": list(sources),
        }
        _publish(prefix, store, facts)
        return {**facts, "prefix": str(prefix), "already": False, **counts}


def as_prefix(out: str) -> Path:
    """The prefix behind `out`, which may carry a .bin or .idx suffix."""
    return Path(strip_suffix(out)).expanduser()


def dtype_for(size: int) -> str:
    """Stored type of ids below `size`: Megatron's rule, two bytes up to 65,499 ids and four above."""
    return "uint16" if size < 65500 else "int32"


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """What PREFIX.json records of a tokenizer."""
    return {"ref": tokenizer.ref, "size": tokenizer.size, "digest": tokenizer.digest, "eod": tokenizer.eod}


class _OldCorpus:
    """The corpus already at the prefix, as a store of parts: `places` maps a key to (document, token, Part) offsets."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.facts: dict[str, Any] = {}
        self.places: dict[str, tuple[int, int, Part]] = {}
        try:
            facts = json.loads(Path(f"{prefix}.json").read_text())
            index = json.loads(Path(f"{prefix}.parts", "index.json").read_text())
            bin_size = Path(f"{prefix}.bin").stat().st_size
            idx_size = Path(f"{prefix}.idx").stat().st_size
            whole = facts["content"] == index["content"] and facts["format"] == FORMAT
            # 34 bytes of header, then length (4), offset (8) and document border (8) of each, plus a border.
            whole &= bin_size == facts["tokens"] * np.dtype(facts["dtype"]).itemsize
            whole &= idx_size == 34 + 20 * facts["documents"] + 8
        except (OSError, ValueError, KeyError, TypeError):
            return  # none, of another tool, or damaged: made anew
        if whole:
            self.facts = facts
            document = token = 0
            for entry in index["parts"]:
                part = Part(**entry)
                self.places.setdefault(part.key, (document, token, part))
                document, token = document + part.documents, token + part.tokens

    def read(self, key: str) -> tuple[Part, np.ndarray, np.ndarray]:
        document, token, part = self.places[key]
        lengths = np.fromfile(f"{self.prefix}.idx", np.int32, part.documents, offset=34 + 4 * document)
        dtype = np.dtype(self.facts["dtype"])
        return part, lengths, np.fromfile(f"{self.prefix}.bin", dtype, part.tokens, offset=token * dtype.itemsize)


def _write(
    prefix: Path, store: Path, keys: list[str], old: _OldCorpus, settings: Settings, progress: Progress | None
) -> dict[str, Any]:
    """Put the parts together in PREFIX.bin.aside and PREFIX.idx.aside; the counts for PREFIX.json."""
    with quiet_megatron():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    dtype = np.dtype(settings.dtype)
    builder = IndexedDatasetBuilder(f"{prefix}.bin.aside", dtype=dtype.type)
    parts, skipped = [], Counter[str]()
    for number, key in enumerate(keys, 1):
        part, lengths, tokens = old.read(key) if key in old.places else read_part(store, key)
        end = 0
        for length in lengths.tolist():
            builder.add_document(tokens[end : end + length], [length])
            end += length
        parts.append(part)
        skipped += Counter(part.skipped)
        if progress:
            progress("write", number, len(keys), sum(p.tokens for p in parts) if number == len(keys) else 0)
    builder.finalize(f"{prefix}.idx.aside")
    return {
        "documents": sum(p.documents for p in parts),
        "tokens": sum(p.tokens for p in parts),
        "dtype": settings.dtype,
        "max_id": max((p.max_id for p in parts), default=-1),
        "skipped": dict(skipped),
        "parts": [asdict(p) for p in parts],
    }


def _publish(prefix: Path, store: Path, facts: dict[str, Any]) -> None:
    """Rename the finished files into place; a kill between two renames leaves no PREFIX.json that lies about them."""
    for suffix in (".bin", ".idx"):
        with open(f"{prefix}{suffix}.aside", "rb") as stream:
            os.fsync(stream.fileno())
    Path(f"{prefix}.json").unlink(missing_ok=True)
    for suffix in (".bin", ".idx"):
        os.replace(f"{prefix}{suffix}.aside", f"{prefix}{suffix}")
    index = {"content": facts["content"], "parts": facts.pop("parts")}
    _write_json(store / "index.json", index, indent=None)
    _write_json(Path(f"{prefix}.json"), facts, indent=2)
    drop_parts(store)


def _write_json(path: Path, content: dict[str, Any], indent: int | None) -> None:
    aside = path.with_name(path.name + ".aside")
    with open(aside, "w") as out:
        json.dump(content, out, indent=indent, ensure_ascii=False)
        out.flush()
        os.fsync(out.fileno())
    os.replace(aside, path)


def _estimate(files: Sequence[SourceFile], tokenizer: Tokenizer, limit_mb: float) -> tuple[int, int]:
    """Bytes of text in `files` and bytes of the corpus made of them, both rough."""
    text = sum(f.size * (4 if f.path.suffix in COMPRESSED else 2 if f.kind == "parquet" else 1) for f in files)
    text = min(text, int(limit_mb * 1e6)) if limit_mb else text
    per_byte = 1.0 if tokenizer.location == BYTE else 0.35  # tokens; a subword holds three to four bytes of text
    return text, int(text * per_byte * np.dtype(dtype_for(tokenizer.size)).itemsize)


def _check_room(prefix: Path, files: Sequence[SourceFile], tokenizer: Tokenizer, limit_mb: float) -> None:
    need = 2 * _estimate(files, tokenizer, limit_mb)[1]  # the parts and the corpus are there together for a moment
    free = shutil.disk_usage(prefix.parent).free
    if need > free:
        raise MachineError(
            f"no room on disk: about {need / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free",
            str(prefix.parent),
            "free some space, choose another folder with --out, or read less with --limit-mb",
        )


@contextmanager
def _file_errors(prefix: Path) -> Iterator[None]:
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        where = str(error.filename or prefix.parent)
        if error.errno in NO_ROOM:
            hint = "free some space and type the same command again: it continues where it stopped"
            raise MachineError("no room left on disk (or, by ulimit -f, in this file)", where, hint) from None
        raise InputError(
            f"cannot read or write here: {error.strerror or error}",
            where,
            "check its permissions, or choose another --out",
        ) from None


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    store.mkdir(exist_ok=True)
    with open(store / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                "another `infir2 data prepare` is writing this corpus",
                str(store),
                "wait for it, or choose another --out",
            ) from None
        yield
