"""Files to documents.

A source is a text file (one document), a JSONL file (one document a line), a Parquet file (one a row), a folder (a
source tree: each text file is one document) or `python-stdlib`, the standard library of the running interpreter,
which is there on every machine. All but Parquet may be compressed (.gz, .zst). What a file is, is told by its suffix.

Reading cuts every source into `Block`s of a few megabytes: the unit that is tokenised, stored and found again. Cuts
depend on content (a hash of the file name or of the line), not on position, so a change in one place moves no cut
elsewhere and only its own block has to be tokenised again. This module does not tokenise and does not parse JSON: it
only reads bytes, hashes them and decides where blocks end.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from infir2_core.errors import InputError, MachineError, nearest

STDLIB = "python-stdlib"
JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
COMPRESSED = (".gz", ".zst")
TEXT = tuple(
    ".c .cc .cfg .cpp .cs .css .cu .cuh .go .h .hpp .html .ini .java .jl .js .json .kt .lua .m .md .ml .php .pl .proto "
    ".py .pyi .pyx .r .rb .rs .rst .scala .sh .sql .swift .tex .toml .ts .tsx .txt .xml .yaml .yml .zig".split()
)
SMALLEST, LARGEST = 2 << 20, 8 << 20  # bytes of text in a block: cuts fall between these two
WHOLE_TEXT_LIMIT = 1 << 30  # bytes; one document must stay below 2**31 tokens


@dataclass(frozen=True)
class SourceFile:
    """One file to read. `name` is its path inside its source, the same on every machine; `size` is bytes on disk."""

    path: Path
    name: str
    kind: Literal["text", "jsonl", "parquet"]
    size: int
    source: str
    listed: bool = True  # named by the user: unreadable text is an error, not a skipped file


@dataclass
class Block:
    """Some consecutive documents, not tokenised yet.

    Attributes:
        kind: "documents" (`payload` holds one UTF-8 text each) or "jsonl" (one line each).
        where: the file, for error messages; of several files, the one read last.
        first_line: number of the first line (JSONL), counted from 1.
        size: bytes of payload.
        read: bytes on disk consumed to make this block, for progress.
    """

    kind: Literal["documents", "jsonl"]
    where: str
    payload: list[bytes] = field(default_factory=list)
    first_line: int = 1
    size: int = 0
    read: int = 0

    def add(self, piece: bytes) -> None:
        self.payload.append(piece)
        self.size += len(piece)

    def digest(self) -> str:
        """sha256 (hex) of kind and payload, borders between documents included."""
        state = hashlib.sha256(self.kind.encode())
        for piece in self.payload:
            state.update(len(piece).to_bytes(8, "little"))
            state.update(piece)
        return state.hexdigest()


def find_files(sources: Sequence[str], extensions: Iterable[str] = ()) -> list[SourceFile]:
    """The files behind `sources`, in the order given; inside a folder, sorted by relative path.

    Folders and files whose name starts with a dot, `__pycache__` and links to folders are left out.

    Args:
        sources: files, folders or "python-stdlib".
        extensions: suffixes to take from folders, such as ".py"; empty means the usual source and text suffixes.

    Raises:
        InputError: a source is missing or unreadable, or a folder holds no file of the wanted kind.
    """
    wanted = tuple(e if e.startswith(".") else f".{e}" for e in extensions) or TEXT
    return [file for source in sources for file in _files_of(source, wanted)]


def _files_of(source: str, wanted: tuple[str, ...]) -> list[SourceFile]:
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return _tree(source, root, (".py",), ("site-packages", "dist-packages", "test", "tests"))
    path = Path(source).expanduser()
    if path.is_dir():
        return _tree(source, path, wanted, ())
    if not path.is_file():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"no such file or folder: {source}", "", nearest(path.name, [*siblings, STDLIB]))
    if not os.access(path, os.R_OK):
        raise InputError("no permission to read this file", source, f"chmod u+r {source}")
    return [SourceFile(path, path.name, _kind(path.name), path.stat().st_size, source)]


def _tree(source: str, root: Path, wanted: tuple[str, ...], without: tuple[str, ...]) -> list[SourceFile]:
    files, seen = [], Counter[str]()
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = [d for d in subfolders if not d.startswith(".") and d != "__pycache__" and d not in without]
        for name in names:
            suffix = Path(_plain(name)).suffix
            seen[suffix] += 1
            path = Path(folder, name)
            if suffix in wanted and not name.startswith(".") and path.is_file():
                relative = path.relative_to(root).as_posix()
                files.append(SourceFile(path, relative, _kind(name), path.stat().st_size, source, listed=False))
    if not files:
        others = ", ".join(f"{s or '(none)'} {n}" for s, n in seen.most_common(5)) or "nothing"
        raise InputError(
            f"no file to read in this folder; it holds {others}",
            source,
            "choose suffixes with --ext, such as --ext .txt,.jsonl",
        )
    return sorted(files, key=lambda f: f.name)


def _refuse(error: OSError) -> None:
    raise InputError(f"cannot list this folder: {error.strerror}", str(error.filename), "check its permissions")


def _plain(name: str) -> str:
    """`name` without its compression suffix."""
    return name.rsplit(".", 1)[0] if name.endswith(COMPRESSED) else name


def _kind(name: str) -> Literal["text", "jsonl", "parquet"]:
    plain = _plain(name)
    return "jsonl" if plain.endswith(JSONL) else "parquet" if plain.endswith(PARQUET) else "text"


def read_blocks(files: Sequence[SourceFile], text_key: str, skipped: Counter[str], limit: int = 0) -> Iterator[Block]:
    """Read `files` in order and cut them into blocks.

    Args:
        files: from `find_files`.
        text_key: column of Parquet files that holds the text.
        skipped: counts files left out, by reason; filled while reading.
        limit: stop after this many bytes of text (the document that crosses it is the last one); 0 reads everything.

    Raises:
        InputError: a file is damaged, holds no text, or is not what its suffix says.
        MachineError: the package that reads .zst or Parquet is missing.
    """
    left = limit or sys.maxsize
    for block in _cut(files, text_key, skipped):
        if block.size >= left:
            _shorten(block, left)
            yield block
            return
        left -= block.size
        yield block


def _shorten(block: Block, limit: int) -> None:
    total = 0
    for count, piece in enumerate(block.payload, 1):
        total += len(piece)
        if total >= limit:
            del block.payload[count:]
            break
    block.size = total


def _cut(files: Sequence[SourceFile], text_key: str, skipped: Counter[str]) -> Iterator[Block]:
    tree: Block | None = None
    for file in files:
        if file.kind == "text":
            if tree is None:
                tree = Block("documents", file.source)
            text = _whole_text(file, skipped)
            tree.read += file.size
            if text is not None:
                tree.add(text)
            # One file in 32 ends a block, chosen by its name: adding or changing a file moves no other border.
            if tree.size >= LARGEST or zlib.crc32(file.name.encode()) % 32 == 0:
                yield tree
                tree = None
            continue
        if tree is not None:
            yield tree
            tree = None
        blocks = _jsonl(file) if file.kind == "jsonl" else _parquet(file, text_key)
        empty = True
        for block in blocks:
            empty = False
            yield block
        if empty:
            raise InputError("this file holds no documents", str(file.path), "give a file with data, or leave it out")
    if tree is not None:
        yield tree


def _whole_text(file: SourceFile, skipped: Counter[str]) -> bytes | None:
    """The file's bytes when they are UTF-8 text; None, counted in `skipped`, when they are not."""
    with opened(file.path) as (stream, _):
        text = stream.read(WHOLE_TEXT_LIMIT + 1)
    if len(text) > WHOLE_TEXT_LIMIT:
        raise InputError(
            "a text file is one document, and this one is above 1 GiB",
            str(file.path),
            "store it as JSONL, one document a line",
        )
    if not text.strip():
        if file.listed:
            raise InputError("this file is empty", str(file.path), "give a file with data, or leave it out")
        skipped["empty"] += 1
        return None
    problem = "binary" if b"\0" in text[:8192] else ""
    if not problem:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            problem = "not_utf8"
            if file.listed:
                raise InputError(
                    f"not UTF-8 text (byte {error.start})",
                    str(file.path),
                    f"iconv -f latin1 -t utf-8 {file.path} > FIXED",
                ) from None
    if problem:
        if file.listed:
            raise InputError(
                "this is a binary file, not text",
                str(file.path),
                "known suffixes: .jsonl, .parquet, .txt, also .gz and .zst",
            )
        skipped[problem] += 1
        return None
    return text


def _jsonl(file: SourceFile) -> Iterator[Block]:
    with opened(file.path) as (stream, raw):
        block, number, consumed = Block("jsonl", str(file.path)), 0, 0
        for number, line in enumerate(stream, 1):
            block.add(line)
            # As for trees: a line chosen by its content ends the block, so an insertion moves only the nearest border.
            if block.size >= LARGEST or (block.size >= SMALLEST and zlib.crc32(line) % 64 == 0):
                block.read, consumed = raw.tell() - consumed, raw.tell()
                yield block
                block = Block("jsonl", str(file.path), first_line=number + 1)
        if any(line.strip() for line in block.payload):
            block.read = file.size - consumed
            yield block


def _parquet(file: SourceFile, column: str) -> Iterator[Block]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise MachineError("reading Parquet needs the package pyarrow", str(file.path), "pip install pyarrow") from None
    try:
        table: Any = pq.ParquetFile(file.path)
    except (pa.ArrowInvalid, pa.ArrowIOError) as error:
        raise InputError(f"not a Parquet file: {error}", str(file.path), "write or download it again") from None
    if column not in table.schema_arrow.names:
        raise InputError(
            f"no column '{column}'",
            str(file.path),
            nearest(column, table.schema_arrow.names) + " Choose with --text-key.",
        )
    kind = table.schema_arrow.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(
            f"column '{column}' holds {kind}, not text", str(file.path), "choose a text column with --text-key"
        )
    rows, block, share = max(1, table.metadata.num_rows), Block("documents", str(file.path)), 0.0
    try:
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            for text in batch.column(0).to_pylist():
                block.add((text or "").encode())
                share += file.size / rows
                if block.size >= LARGEST or (block.size >= SMALLEST and zlib.crc32(block.payload[-1]) % 64 == 0):
                    block.read = int(share)
                    yield block
                    block, share = Block("documents", str(file.path)), 0.0
    except (pa.ArrowInvalid, pa.ArrowIOError, OSError) as error:
        raise InputError(f"damaged Parquet file: {error}", str(file.path), "write or download it again") from None
    if block.payload:
        block.read = int(share)
        yield block


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The decompressed stream of `path`, and the raw one (whose position tells how much was read)."""
    try:
        with open(path, "rb") as raw:
            yield _decompressed(path, raw), raw
    except PermissionError:
        raise InputError("no permission to read this file", str(path), f"chmod u+r {path}") from None
    except Exception as error:
        # zstandard is optional, so its error class is told by name.
        if not isinstance(error, EOFError | zlib.error | gzip.BadGzipFile) and type(error).__name__ != "ZstdError":
            raise
        raise InputError(f"damaged {path.suffix} file: {error}", str(path), "compress or download it again") from None


def _decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]
    if path.suffix == ".zst":
        try:
            import zstandard
        except ModuleNotFoundError:
            raise MachineError("reading .zst needs the package zstandard", str(path), "pip install zstandard") from None
        return io.BufferedReader(_Zst(raw, zstandard.ZstdDecompressor()), 1 << 20)
    return raw


class _Zst(io.RawIOBase):
    """Decompressed bytes of a .zst file, frame after frame (appending and parallel compressors write several).

    zstandard's own stream reader takes a file cut in the middle of a frame for a shorter one; this one raises EOFError.
    """

    def __init__(self, raw: IO[bytes], decompressor: Any) -> None:
        self.raw, self.decompressor = raw, decompressor
        self.frame: Any = None  # the frame being read; None between frames
        self.ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready and self._more():
            pass
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def _more(self) -> bool:
        left = self.frame.unused_data if self.frame is not None and self.frame.eof else b""
        if self.frame is not None and self.frame.eof:
            self.frame = None
        data = left or self.raw.read(1 << 16)
        if not data:
            if self.frame is not None:
                raise EOFError("it ends in the middle of a frame")
            return False
        self.frame = self.frame or self.decompressor.decompressobj()
        self.ready = self.frame.decompress(data)
        return True
