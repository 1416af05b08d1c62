"""Documents to a Megatron corpus: PREFIX.bin (ids), PREFIX.idx (where documents end), PREFIX.json (how it was made).

The work is a list of blocks (sources.py), each named by the hash of its text, the tokenizer and the settings. One
process reads and hashes; the others tokenise blocks nobody has tokenised before and leave each as a part in
PREFIX.parts/, written aside and renamed. When all are there they are put together in source order. So:

- a run that was killed continues with the parts it finds;
- the same sources, tokenizer and settings again find the same content key and do nothing;
- when one file changed, only its block is tokenised; the others are copied out of the old PREFIX.bin, whose layout
  PREFIX.parts/index.json remembers after the parts themselves are gone;
- the result does not depend on the number of processes.

Each document is followed by the tokenizer's end-of-document id. Nothing is shuffled here: Megatron's dataset draws the
order from the run's seed, and its train/validation/test split takes documents in the order they are stored.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import threading
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infir2_core.data.corpus import quiet_megatron
from infir2_core.data.prefixes import strip_suffix
from infir2_core.data.sources import COMPRESSED, SMALLEST, Block, SourceFile, find_files, read_blocks
from infir2_core.data.tokenizer import BYTE, Tokenizer, load_tokenizer
from infir2_core.errors import InputError, MachineError, nearest

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

FORMAT = 1
Progress = Callable[
    [str, int, int, int], None
]  # stage ("tokenise" or "write"), bytes done, bytes in all, tokens so far


@dataclass(frozen=True)
class Part:
    """What is known of one tokenised block. `key` names its content; `skipped` counts documents left out, by reason."""

    key: str
    documents: int
    tokens: int
    max_id: int
    skipped: dict[str, int]


@dataclass(frozen=True)
class Settings:
    """Everything but the text that decides which ids a block gives."""

    tokenizer: str  # location: "byte" or a folder
    digest: str
    eod: int
    dtype: str
    text_key: str

    def key(self, block: Block) -> str:
        named = [FORMAT, self.digest, self.eod, self.dtype, self.text_key if block.kind == "jsonl" else ""]
        return hashlib.sha256((json.dumps(named) + block.digest()).encode()).hexdigest()[:40]


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
        with _Tokenising(store, settings, tokenizer, processes, progress, total) as work:
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
            _drop_parts(store)
            return {**old.facts, "prefix": str(prefix), "already": True, **counts}
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


class _Tokenising:
    """Hands blocks to the worker processes and keeps track of what is done, in source order.

    At most two blocks a worker are in flight, so memory stays bounded however large the sources are.
    """

    def __init__(
        self, store: Path, settings: Settings, tokenizer: Tokenizer, workers: int, progress: Progress | None, total: int
    ) -> None:
        self.store, self.settings, self.tokenizer, self.workers = store, settings, tokenizer, workers
        self.progress, self.total = progress, total
        self.keys: list[str] = []
        self.submitted: set[str] = set()
        self.pool: ProcessPoolExecutor | None = None
        self.pending: deque[tuple[Future[int] | None, int]] = deque()
        self.bytes = self.tokens = 0
        self.room_checked = False

    def __enter__(self) -> _Tokenising:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while kind is None and self.pending:
                self._settle()
        finally:
            if self.pool is not None:
                self.pool.shutdown(wait=True, cancel_futures=True)

    def has(self, key: str) -> bool:
        return key in self.submitted or (self.store / f"{key}.npz").exists()

    def check_room_once(self, check: Callable[[], None]) -> None:
        if not self.room_checked:
            self.room_checked = True
            check()

    def submit(self, key: str, block: Block) -> None:
        self.submitted.add(key)
        if self.workers == 1:
            self.tokens += _tokenise(self.tokenizer, self.settings, self.store, key, block)
            return
        if self.pool is None:
            import multiprocessing
            from concurrent.futures import ProcessPoolExecutor

            # Spawned, not forked: this process may hold threads (a progress bar, the tokenizer's own pool).
            spawn = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.workers, spawn, _start_worker, (self.settings, str(self.store)))
        self.pending.append((self.pool.submit(_work, key, block), 0))

    def done(self, key: str, read: int) -> None:
        """Note that block `key`, made of `read` bytes on disk, has been dealt with or handed over."""
        self.keys.append(key)
        self.pending.append((None, read))
        while self.pending:
            future = self.pending[0][0]
            if future is not None and not future.done() and len(self.pending) <= 4 * self.workers:
                break
            self._settle()

    def _settle(self) -> None:
        future, read = self.pending.popleft()
        if future is not None:
            from concurrent.futures.process import BrokenProcessPool

            try:
                self.tokens += future.result()
            except BrokenProcessPool:
                raise MachineError(
                    "a worker process was killed, most likely for lack of memory", "", "use fewer: --workers 1"
                ) from None
        self.bytes += read
        if self.progress:
            self.progress("tokenise", self.bytes, self.total, self.tokens)


_worker: tuple[Tokenizer, Settings, Path]  # of a worker process, set once when it starts


def _start_worker(settings: Settings, store: str) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's to handle
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker = load_tokenizer(settings.tokenizer), settings, Path(store)


def _die_with_parent() -> None:
    """A worker waits for work on a pipe that it holds open itself, so it would outlive a parent that is killed."""
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(key: str, block: Block) -> int:
    return _tokenise(*_worker, key, block)


def _tokenise(tokenizer: Tokenizer, settings: Settings, store: Path, key: str, block: Block) -> int:
    """Tokenise `block` and store it as part `key`; its number of tokens."""
    texts = list(_texts(block, settings.text_key))
    kept = [text for text in texts if text.strip()]
    eod = np.array([settings.eod], settings.dtype)
    arrays = [array for ids in tokenizer.encode_many(kept, settings.dtype) for array in (ids, eod)]
    tokens = np.concatenate(arrays) if arrays else np.array([], settings.dtype)
    lengths = np.array([len(ids) + 1 for ids in arrays[::2]], np.int32)
    skipped = {"empty": len(texts) - len(kept)} if len(texts) > len(kept) else {}
    part = Part(key, len(lengths), len(tokens), int(tokens.max()) if len(tokens) else -1, skipped)
    aside = store / f"{key}.{os.getpid()}.aside"
    with open(aside, "wb") as out:
        np.savez(out, lengths=lengths, tokens=tokens, facts=np.frombuffer(json.dumps(asdict(part)).encode(), np.uint8))
        out.flush()
        os.fsync(out.fileno())
    os.replace(aside, store / f"{key}.npz")
    return len(tokens)


def _texts(block: Block, text_key: str) -> Iterator[str]:
    if block.kind == "documents":
        yield from (text.decode("utf-8-sig") for text in block.payload)
        return
    for number, line in enumerate(block.payload, block.first_line):
        if not line.strip():
            continue
        where = f"{block.where}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, UnicodeDecodeError) as error:
            raise InputError(f"not JSON: {error}", where, f"correct or delete line {number}") from None
        if not isinstance(record, dict):
            raise InputError(
                f"not a JSON object but {type(record).__name__}", where, 'every line must look like {"text": "..."}'
            )
        if text_key not in record:
            raise InputError(f"no key '{text_key}'", where, nearest(text_key, record) + " Choose with --text-key.")
        text = record[text_key]
        if not isinstance(text, str):
            raise InputError(
                f"'{text_key}' is {type(text).__name__}, not text", where, "choose another key with --text-key"
            )
        # JSON can spell half a surrogate pair, which no encoding can store.
        yield text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


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
        part, lengths, tokens = old.read(key) if key in old.places else _read_part(store, key)
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


def _read_part(store: Path, key: str) -> tuple[Part, np.ndarray, np.ndarray]:
    path = store / f"{key}.npz"
    try:
        with np.load(path) as stored:
            return Part(**json.loads(stored["facts"].tobytes())), stored["lengths"], stored["tokens"]
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError):
        path.unlink(missing_ok=True)
        raise InputError("a stored part was damaged", str(path), "it is removed: type the same command again") from None


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
    _drop_parts(store)


def _write_json(path: Path, content: dict[str, Any], indent: int | None) -> None:
    aside = path.with_name(path.name + ".aside")
    with open(aside, "w") as out:
        json.dump(content, out, indent=indent, ensure_ascii=False)
        out.flush()
        os.fsync(out.fileno())
    os.replace(aside, path)


def _drop_parts(store: Path) -> None:
    for path in store.iterdir():
        if path.suffix in (".npz", ".aside"):
            path.unlink(missing_ok=True)


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
            f"no room on disk: about {need / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free",
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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space and type the same command again: it continues where it stopped"
            raise MachineError("no room left on disk", where, hint) from None
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
