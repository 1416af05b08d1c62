"""Chat data as training samples: tokenised once, kept on disk, read by number.

`open_chat` makes or finds a folder of the cache, named by the content of the files, the tokenizer, its template and the
settings:

    tokens.bin    int32 ids of all samples, one after the other
    mask.bin      what of them is trained: one bit a token, each sample from a new byte
    index.npz     per sample: tokens, trained targets, file, line
    report.json   what was counted on the way
    sums.json     sha256 of each of these files, which they must have to be believed

It is written in one pass that holds a few samples at a time, aside and renamed, and read through memory maps, so data
may be larger than memory. Processes that open the same set find the same folder; open it in one before starting others,
or each will tokenise.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

from infir2_core.data.chat_record import SampleError
from infir2_core.data.chat_source import Bad, Record, chat_files, content_digests, place, read_chat
from infir2_core.data.chat_template import ChatTokenizer, load_chat_tokenizer
from infir2_core.data.corpus import build_aside
from infir2_core.data.sources import SourceFile
from infir2_core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2
FILES = ("tokens.bin", "mask.bin", "index.npz", "report.json")
SUMS = "sums.json"
MOST_DROPPED = 0.5  # share of samples that are too long above which a set is refused: the rest would be another set
CHUNK = 64  # samples tokenised together
TooLong = Literal["drop", "truncate"]


@dataclass(frozen=True)
class Trouble:
    """Bad records of one kind: how many, where the first one stands and what is wrong with it."""

    count: int
    where: str
    detail: str


@dataclass(frozen=True)
class ChatReport:
    """What became of the records of a data set.

    Attributes:
        records: read, blank lines not counted.
        samples: kept.
        dropped: too long, or nothing to train left after truncation.
        truncated: cut to fit; they are kept.
        too_long: where the first record of these two stands; empty when there is none.
        bad: kind -> Trouble.
        layouts: file -> layouts of its records.
        prompt_tokens, trained_tokens: of the samples that are kept, before any split.
        folded: records whose reasoning_content the template does not know; see chat_template.py.
    """

    records: int
    samples: int
    dropped: int
    truncated: int
    too_long: str
    bad: dict[str, Trouble]
    layouts: dict[str, list[str]]
    prompt_tokens: int
    trained_tokens: int
    folded: int

    @property
    def bad_records(self) -> int:
        return sum(trouble.count for trouble in self.bad.values())

    def lines(self) -> list[str]:
        """The report for people, one finding a line."""
        said = [f"{file}: {', '.join(layouts) or 'no sample'}" for file, layouts in self.layouts.items()]
        tokens = f"{self.prompt_tokens + self.trained_tokens:,} tokens, {self.trained_tokens:,} of them trained"
        said.append(f"{self.samples:,} samples of {self.records:,} records, {tokens}")
        if self.dropped or self.truncated:
            counts = f"{self.dropped:,} dropped, {self.truncated:,} truncated"
            said.append(f"too long: {counts} (the first: {self.too_long})")
        for kind, trouble in self.bad.items():
            said.append(f"left out, {kind}: {trouble.count:,} (the first: {trouble.where}: {trouble.detail})")
        if self.folded:
            said.append(f"reasoning_content put into the content as <think>...</think>: {self.folded:,} records")
        return said


@dataclass(frozen=True)
class ChatSample:
    """n + 1 tokens (int64) and the weight of each of the n targets tokens[1:] (float32, 1 where it is trained)."""

    tokens: Tensor
    weights: Tensor


class ChatSet:
    """Samples by number.

    Attributes:
        lengths: int64, predicted positions of each sample: its tokens but one.
        trained_tokens: targets with weight 1 in all samples.
        digest: sha256 (hex) of what determines the samples, their order and their number.
        report: of the whole data set, also in the parts of a split.
    """

    def __init__(self, folder: Path, digest: str, report: ChatReport) -> None:
        index = np.load(folder / "index.npz")
        self.digest, self.report = digest, report
        self._tokens_of: np.ndarray = index["tokens"]
        self._trained: np.ndarray = index["trained"]
        self._starts = np.concatenate(([0], np.cumsum(self._tokens_of)))
        self._bit_starts = np.concatenate(([0], np.cumsum((self._tokens_of + 7) // 8)))
        self._tokens = np.memmap(folder / "tokens.bin", "<i4", "r")
        self._mask = np.memmap(folder / "mask.bin", np.uint8, "r")
        self._chosen = np.arange(len(self._tokens_of))

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def lengths(self) -> np.ndarray:
        positions: np.ndarray = self._tokens_of[self._chosen] - 1
        return positions

    @property
    def trained_tokens(self) -> int:
        return int(self._trained[self._chosen].sum())

    def sample(self, i: int) -> ChatSample:
        """Sample i of `len(self)`.

        Raises:
            IndexError: i is not a sample's number.
        """
        import torch

        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        n = int(self._chosen[i])
        tokens = self._tokens[self._starts[n] : self._starts[n + 1]].astype(np.int64)
        bits = np.unpackbits(self._mask[self._bit_starts[n] : self._bit_starts[n + 1]], count=len(tokens))
        return ChatSample(torch.from_numpy(tokens), torch.from_numpy(bits[1:].astype(np.float32)))

    def split(self, share: float, seed: int) -> tuple[ChatSet, ChatSet]:
        """This set without a share of its samples, and these samples, chosen by `seed` alone; both keep their order.

        At least one sample is held out when `share` is above 0, and at least one stays.

        Raises:
            InputError: a share outside 0 to 1, or too few samples to hold one out.
        """
        if not 0 <= share < 1:
            raise InputError(f"a held-out share of {share:g}", "eval share", "give a share from 0 to below 1")
        if share and len(self) < 2:
            raise InputError("one sample cannot be split", "eval share", "give more data, or a held-out share of 0")
        held = min(max(1, round(share * len(self))), len(self) - 1) if share else 0
        out = np.zeros(len(self), bool)
        out[epoch_order(len(self), seed, 0)[:held]] = True
        return self._part(~out, f"train {share} {seed}"), self._part(out, f"held out {share} {seed}")

    def _part(self, chosen: np.ndarray, name: str) -> ChatSet:
        part = copy.copy(self)
        part._chosen = self._chosen[chosen]
        part.digest = hashlib.sha256(f"{self.digest} {name}".encode()).hexdigest()
        return part


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """int64 permutation of range(count): the order of one epoch.

    Samples are sorted by the 64-bit numbers of NumPy's Philox generator with the key (seed, epoch). Its stream is the
    same on all machines and in all versions of NumPy, which its shuffling functions do not promise.
    """
    key = np.array([seed % 2**64, epoch % 2**64], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def open_chat(
    path: Path,
    tokenizer_ref: str,
    max_tokens: int,
    too_long: TooLong,
    cache: Path,
    max_bad_share: float = 0.01,
    progress: Callable[[int], None] | None = None,
) -> ChatSet:
    """Opens chat data for training; the first time, tokenises it into `cache`.

    Args:
        path: a JSONL or Parquet file, or a folder of such files.
        tokenizer_ref: see `load_chat_tokenizer`.
        max_tokens: predicted positions of the longest sample: one token less than it has.
        too_long: whether longer samples are dropped or keep their first tokens.
        cache: folder of tokenised sets.
        max_bad_share: share of bad records above which the set is refused.
        progress: told the number of records read so far.

    Raises:
        InputError: no such data, a damaged file, a tokenizer without template, too many bad records, more samples
            dropped as too long than kept.
        MachineError: a missing package.
    """
    files, tokenizer = chat_files(path), load_chat_tokenizer(tokenizer_ref)
    contents = content_digests(files, cache / "files")
    named = [FORMAT, contents, tokenizer.digest, max_tokens, too_long]
    digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()
    folder = cache / digest[:24]
    if not _whole(folder):
        shutil.rmtree(folder, ignore_errors=True)
        build_aside(folder, lambda aside: _Writer(aside, files, max_tokens, too_long).write(tokenizer, progress))
    report = _read_report(folder, files)
    _refuse(report, str(path), max_bad_share, max_tokens, too_long)
    return ChatSet(folder, digest, report)


def _whole(folder: Path) -> bool:
    """Whether a set is there as it was written: disks and people damage caches. Reads all of it, once an opening."""
    try:
        stored = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        return bool(stored == _sums(folder))
    except (OSError, ValueError, RecursionError):
        return False


def _sums(folder: Path) -> dict[str, str]:
    found = {}
    for name in FILES:
        with open(folder / name, "rb") as stream:
            found[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def _read_report(folder: Path, files: list[SourceFile]) -> ChatReport:
    """The stored report, with files under their present names."""
    stored = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    places = {kind: place(files[file], line) for kind, (file, line) in stored.pop("places").items()}
    bad = {kind: Trouble(count, places[kind], detail) for kind, (count, detail) in stored.pop("bad").items()}
    layouts = {file.name: found for file, found in zip(files, stored.pop("layouts"), strict=True)}
    return ChatReport(**stored, too_long=places.get("too long", ""), bad=bad, layouts=layouts)


def _refuse(report: ChatReport, where: str, max_bad_share: float, max_tokens: int, too_long: TooLong) -> None:
    firsts = "; ".join(f"{kind} ({t.count:,}), {t.where}: {t.detail}" for kind, t in report.bad.items())
    if not report.records:
        raise InputError("this holds no records", where, "give a file with chat data")
    if report.bad_records > max_bad_share * report.records:
        share = f"{report.bad_records:,} of {report.records:,} records are bad, more than {max_bad_share:.2%}"
        raise InputError(f"{share}. {firsts}", where, "mend them, or allow a larger share: --max-bad-share 0.05")
    longer = "a larger --max-tokens and --row-tokens"
    hint = f"--too-long truncate, or {longer}" if too_long == "drop" else longer
    first = f"{report.too_long}: longer than {max_tokens:,} tokens"
    if not report.samples:
        long = f"too long ({report.dropped:,}), {first}" if report.dropped else ""
        what = f"no sample is left. {'; '.join(filter(None, [long, firsts]))}"
        raise InputError(what, where, hint if report.dropped else "mend them")
    if report.dropped > MOST_DROPPED * (report.dropped + report.samples):
        share = f"{report.dropped:,} of {report.dropped + report.samples:,} samples are dropped as too long"
        raise InputError(f"{share}, more than half. The first: {first}", where, hint)


class _Writer:
    """One pass over the files into the folder `aside`."""

    def __init__(self, aside: Path, files: list[SourceFile], max_tokens: int, too_long: TooLong) -> None:
        self.aside, self.files, self.max_tokens, self.too_long = aside, files, max_tokens, too_long
        self.rows = array("q")  # tokens, trained targets, file, line; of the next sample, and so on
        self.counts = {"records": 0, "dropped": 0, "truncated": 0, "folded": 0}
        self.bad: dict[str, tuple[int, str]] = {}
        self.places: dict[str, tuple[int, int]] = {}  # of the first record of each kind of trouble
        self.layouts: list[list[str]] = [[] for _ in files]
        self.ids: dict[bytes, tuple[int, int]] = {}

    def write(self, tokenizer: ChatTokenizer, progress: Callable[[int], None] | None) -> None:
        with open(self.aside / "tokens.bin", "wb") as tokens, open(self.aside / "mask.bin", "wb") as mask:
            records = self._good()
            while chunk := list(islice(records, CHUNK)):
                self.counts["folded"] += sum(tokenizer.folds(record.said.messages) for record in chunk)
                made = tokenizer.encode_many([(record.said.messages, record.said.tools) for record in chunk])
                for record, result in zip(chunk, made, strict=True):
                    if isinstance(result, SampleError):
                        self._trouble(record.file, record.line, result.kind, result.detail)
                    else:
                        self._keep(record, *result, tokens, mask)
                if progress:
                    progress(self.counts["records"])
        tokens_of, trained, source, line = np.array(self.rows, np.int64).reshape(-1, 4).T
        np.savez(self.aside / "index.npz", tokens=tokens_of, trained=trained, file_number=source, line=line)
        report: dict[str, Any] = self.counts | {"samples": len(tokens_of), "trained_tokens": int(trained.sum())}
        report["prompt_tokens"] = int(tokens_of.sum()) - report["trained_tokens"]
        report |= {"bad": self.bad, "places": self.places, "layouts": self.layouts}
        (self.aside / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (self.aside / SUMS).write_text(json.dumps(_sums(self.aside), indent=1) + "\n", encoding="utf-8")

    def _good(self) -> Iterator[Record]:
        """Records that are conversations; the others, and those whose id was there before, are counted."""
        for record in read_chat(self.files):
            self.counts["records"] += 1
            if isinstance(record, Bad):
                self._trouble(record.file, record.line, record.kind, record.detail)
                continue
            layouts = self.layouts[record.file]
            if record.said.layout not in layouts:
                layouts.append(record.said.layout)
            if record.said.id is not None:
                key = hashlib.blake2b(record.said.id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                before = self.ids.setdefault(key, (record.file, record.line))
                if before != (record.file, record.line):
                    earlier = place(self.files[before[0]], before[1])
                    detail = f"id {record.said.id!r} is also that of {earlier}"
                    self._trouble(record.file, record.line, "repeated id", detail)
                    continue
            yield record

    def _trouble(self, file: int, line: int, kind: str, detail: str) -> None:
        count, first = self.bad.get(kind, (0, detail))
        self.bad[kind] = (count + 1, first)
        self.places.setdefault(kind, (file, line))

    def _keep(self, record: Record, ids: np.ndarray, mask: np.ndarray, tokens: IO[bytes], bits: IO[bytes]) -> None:
        if len(ids) > self.max_tokens + 1:
            self.places.setdefault("too long", (record.file, record.line))
            ids, mask = ids[: self.max_tokens + 1], mask[: self.max_tokens + 1]
            kept = self.too_long == "truncate" and mask[1:].any()
            self.counts["truncated" if kept else "dropped"] += 1
            if not kept:
                return
        tokens.write(ids.astype("<i4").tobytes())
        bits.write(np.packbits(mask).tobytes())
        self.rows.extend((len(ids), int(mask[1:].sum()), record.file, record.line))
