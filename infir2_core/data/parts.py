"""Blocks of text to parts on disk, by as many processes as there are processors.

A part is one tokenised block: PREFIX.parts/KEY.npz with its token ids, the length of each document and what is known of
it. KEY is a hash of the text, the tokenizer and the settings, so a part that is there is right, whoever made it; it is
written aside and renamed, so a part that is there is whole. Which blocks there are and what becomes of the parts is
prepare.py's business.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infir2_core.data.sources import Block
from infir2_core.data.tokenizer import Tokenizer, load_tokenizer
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


class Tokenising:
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

    def __enter__(self) -> Tokenising:
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


def read_part(store: Path, key: str) -> tuple[Part, np.ndarray, np.ndarray]:
    """Part `key`: what is known of it, tokens in each document (int32), token ids. InputError when it is damaged."""
    path = store / f"{key}.npz"
    try:
        with np.load(path) as stored:
            return Part(**json.loads(stored["facts"].tobytes())), stored["lengths"], stored["tokens"]
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError):
        path.unlink(missing_ok=True)
        raise InputError("a stored part was damaged", str(path), "it is removed: type the same command again") from None


def drop_parts(store: Path) -> None:
    """Delete the parts in `store`, and what killed processes left aside."""
    for path in store.iterdir():
        if path.suffix in (".npz", ".aside"):
            path.unlink(missing_ok=True)
