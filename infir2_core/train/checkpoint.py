"""Native checkpoints: saved in the background, complete or not there at all, readable at any number of ranks.

How a save goes: tensors are copied to host memory (the caller may train on at once); a thread writes each rank's file
into `step-N.tmp` and fsyncs it; when every rank has left its record there, rank 0 writes the manifest, fsyncs, and
renames the folder to `step-N`. A process that dies at any moment leaves either the folder under its final name, whole,
or something ending in `.tmp` that nobody reads and `clean` removes.

Row-sharded tensors (optimizer state split over ranks along dim 0) are put together again on load, in whole or just the
rows asked for, whatever the number of ranks was when they were written. No pickle anywhere: safetensors and JSON.

This file decides nothing about *what* is saved: names, tensors and the `state` dictionary are the caller's.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import NO_ROOM, Infir2Error, InputError, MachineError, nearest
from . import manifest
from .fault_points import fault_point
from .shards import DTYPES, NAMES, Shard, ShardFile, size_of, write_file

WRITING, REPLACED, RETIRED = ".tmp", ".replaced.tmp", ".retired.tmp"
MARGIN = 1 << 20  # room asked for beside the tensors: headers, manifest, directory blocks


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory: `tensors` on the CPU under the names they were saved with, `state` as it was given."""

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class _Job:
    """One save under way: host copies and everything needed to write them."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensor]
    shards: dict[str, Shard]
    replicated: list[str]

    @property
    def name(self) -> str:
        return manifest.folder_name(self.step)


class CheckpointStore:
    """The checkpoints of one run, in `folder` (RUN/checkpoints).

    Args:
        folder: created at the first save.
        keep_last: how many of the newest checkpoints `retire` leaves.
        keep_every: checkpoints at multiples of this step also stay until decay is done; 0: none.
        rank, world: this process and the number of processes that save together.
        barrier: waits until all ranks have called it; needed when world > 1. It is called from the saving thread, so
            it must use a process group of its own, with a timeout.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        keep_every: int = 5000,
        rank: int = 0,
        world: int = 1,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        if world > 1 and barrier is None:
            raise ValueError("a checkpoint written by several ranks needs a barrier")
        self.folder, self.keep_last, self.keep_every = folder, keep_last, keep_every
        self.rank, self.world = rank, world
        self._barrier: Callable[[], None] = barrier or (lambda: None)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._host: dict[str, Tensor] = {}  # kept between saves: allocating host memory costs more than the copy
        self._verified: set[tuple[Path, int, int]] = set()  # files whose sha256 this object has already checked
        self._damaged: set[Path] = set()

    # Saving

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        shards: Mapping[str, Shard] | None = None,
        blocking: bool = False,
    ) -> None:
        """Copy everything to host memory and write it in the background; one save is under way at a time.

        Every rank calls this with the same `step`. A tensor named in `shards` is this rank's rows of a larger one; all
        others are the same on every rank and are written by rank 0 alone. `state` (JSON values only) is rank 0's.

        Raises:
            MachineError: the save before this one (this one if blocking) met a full or failing disk.
            InputError: the same, when the folder may not be written to.
            ValueError: an argument that cannot be saved: a dtype without a name, rows that do not fit their Shard.
        """
        self.wait()
        shards = dict(shards or {})
        for name, tensor in tensors.items():
            if tensor.dtype not in NAMES:
                raise ValueError(f"tensor '{name}': {tensor.dtype} cannot be stored")
            if name in shards and tuple(tensor.shape) != shards[name].local_shape:
                raise ValueError(f"tensor '{name}' has shape {list(tensor.shape)}, its shard says {shards[name]}")
        replicated = [name for name in tensors if name not in shards]
        mine = {name: t for name, t in tensors.items() if name in shards or self.rank == 0}
        frozen = json.loads(json.dumps(state, allow_nan=False))  # a copy, and a check that it is plain JSON
        job = _Job(step, frozen, self._snapshot(mine), {n: s for n, s in shards.items() if n in mine}, replicated)
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"save-{job.name}")
        self._thread.start()
        if blocking:
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way; raise the error of the one that was."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _snapshot(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        host: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            kept = self._host.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            host[name] = kept.copy_(tensor.detach())
        self._host = host
        return host

    def _run(self, job: _Job) -> None:
        # Every rank passes every barrier, also after an error of its own: a failing rank must not hang the others.
        failure: BaseException | None = None
        for phase in (self._prepare, self._write, self._publish, self._confirm):
            if failure is None:
                try:
                    phase(job)
                except OSError as error:
                    failure = self._explain(error, job)
                except Exception as error:
                    failure = error
            try:
                self._barrier()
            except Exception as error:
                failure = failure or error
        if failure is not None and self.rank == 0:
            shutil.rmtree(self.folder / (job.name + WRITING), ignore_errors=True)  # give its room back
        self._failure = failure

    def _prepare(self, job: _Job) -> None:
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / (job.name + WRITING)
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir()

    def _write(self, job: _Job) -> None:
        temporary = self.folder / (job.name + WRITING)
        if shutil.disk_usage(temporary).free < size_of(job.tensors) + MARGIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = manifest.file_name(self.rank)
        record = {
            "file": {file: write_file(temporary / file, job.tensors)},
            "tensors": {name: _tensor_record(t, job.shards.get(name), file) for name, t in job.tensors.items()},
            "replicated": job.replicated,
        }
        # The record appears whole or not at all: rank 0 takes its presence for "this rank is done".
        aside = temporary / f"rank-{self.rank}.json.part"
        aside.write_text(json.dumps(record), "utf-8")
        aside.rename(temporary / f"rank-{self.rank}.json")
        fault_point("save:after-tensors", job.step)

    def _publish(self, job: _Job) -> None:
        if self.rank != 0:
            return
        temporary, final = self.folder / (job.name + WRITING), self.folder / job.name
        files: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for rank in range(self.world):
            record_file = temporary / f"rank-{rank}.json"
            try:
                record = json.loads(record_file.read_text("utf-8"))
            except FileNotFoundError:
                raise MachineError(f"rank {rank} did not finish writing {job.name}", str(temporary)) from None
            if alone := set(record["replicated"]) - set(job.replicated):
                raise ValueError(f"rank {rank} has tensors that rank 0 lacks and no shard places: {sorted(alone)[:5]}")
            files |= record["file"]
            _merge(tensors, record["tensors"])
            record_file.unlink()
        _check_cover(tensors)
        content = {"format": manifest.FORMAT, "step": job.step, "world": self.world}
        text = manifest.seal(content | {"files": files, "tensors": tensors, "state": job.state})
        with (temporary / manifest.NAME).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        fault_point("save:before-rename", job.step)
        replaced = self.folder / (job.name + REPLACED)
        if final.exists():  # this step again, after resuming from before it; `clean` undoes a death between the renames
            final.rename(replaced)
        temporary.rename(final)
        _sync_folder(self.folder)
        fault_point("save:after-rename", job.step)
        shutil.rmtree(replaced, ignore_errors=True)
        self._damaged.discard(final)

    def _confirm(self, job: _Job) -> None:
        if self.rank != 0 and not (self.folder / job.name / manifest.NAME).exists():
            raise MachineError(f"checkpoint {job.name} was not completed by rank 0", str(self.folder))

    def _explain(self, error: OSError, job: _Job) -> Infir2Error:
        where = f"{self.folder / job.name}: {error.strerror}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return InputError("no permission to write a checkpoint", where, f"make {self.folder} writable")
        if error.errno not in NO_ROOM:
            return MachineError("writing a checkpoint failed", where)
        probe = next((p for p in (self.folder, *self.folder.parents) if p.exists()), Path("/"))
        needed, free = size_of(job.tensors) + MARGIN, shutil.disk_usage(probe).free
        return MachineError(
            f"no room for checkpoint {job.name}: it needs {needed} bytes ({needed / 1e9:.2f} GB), {free} are free",
            where,
            "free some room (earlier checkpoints are intact), then type the same command again to resume",
        )

    # Reading

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest intact checkpoint (manifest valid, every sha256 right) and why each newer one was passed over."""
        reasons: list[str] = []
        for path in manifest.step_folders(self.folder):
            try:
                content = manifest.read_manifest(path)
                self._verify(path, content, list(content["files"]))
            except InputError as error:
                self._damaged.add(path)
                reasons.append(f"{path.name}: {error.what} ({error.where})")
                continue
            return path, reasons
        return None, reasons

    def load(self, path: Path, only: Mapping[str, Shard | None] | None = None) -> Loaded:
        """Read a checkpoint, written by any number of ranks, to CPU tensors; every file that is read is verified.

        Args:
            path: a `step-N` folder.
            only: names to read, each whole (None) or by rows (Shard); everything, whole, when left out.

        Raises:
            InputError: naming the file, for a missing or damaged manifest, an unknown format, a truncated or altered
                file, a tensor that is not there or has another shape than its Shard says.
        """
        content = manifest.read_manifest(path)
        records: dict[str, Any] = content["tensors"]
        wanted: Mapping[str, Shard | None] = dict.fromkeys(records) if only is None else only
        parts: list[tuple[str, Tensor, int, int, dict[str, Any]]] = []
        tensors: dict[str, Tensor] = {}
        for name, shard in wanted.items():
            if name not in records:
                raise InputError(f"tensor '{name}' is missing", str(path / manifest.NAME), nearest(name, records))
            shape = tuple(records[name]["shape"])
            if shard is not None and shard.shape != shape:
                raise InputError(f"tensor '{name}' is {list(shape)} here, {list(shard.shape)} is expected", str(path))
            first, rows = (0, shape[0] if shape else 1) if shard is None else (shard.offset, shard.rows)
            local = shape if shard is None else shard.local_shape
            tensors[name] = torch.empty(local, dtype=DTYPES[records[name]["dtype"]])
            for part in records[name]["parts"]:
                if part["offset"] < first + rows and first < part["offset"] + part["rows"]:
                    parts.append((name, tensors[name], first, rows, part))
        self._verify(path, content, sorted({part["file"] for *_, part in parts}))
        files = {file: ShardFile(path / file) for file in {part["file"] for *_, part in parts}}
        for name, target, first, rows, part in parts:
            start, stop = max(first, part["offset"]), min(first + rows, part["offset"] + part["rows"])
            into = target[start - first : stop - first] if target.dim() else target
            files[part["file"]].read_rows(name, start - part["offset"], into)
        return Loaded(path, content["step"], content["state"], tensors)

    def _verify(self, path: Path, content: dict[str, Any], names: list[str]) -> None:
        # A resume calls newest() and then load(); hashing a hundred gigabytes once is enough.
        manifest.check_sizes(path, content, names)
        keys = {name: _identity(path / name) for name in names}
        manifest.check_hashes(path, content, [name for name in names if keys[name] not in self._verified])
        self._verified |= set(keys.values())

    # Housekeeping (rank 0; other ranks return at once)

    def retire(self, decay_done: bool) -> list[Path]:
        """Remove checkpoints that are no longer kept and return them: all but the newest `keep_last` intact ones and,
        until the decay is done, those at multiples of `keep_every`. The save under way is not counted.
        """
        if self.rank != 0:
            return []
        kept, removed = 0, []
        for path in manifest.step_folders(self.folder):
            step = manifest.step_of(path) or 0
            milestone = not decay_done and self.keep_every > 0 and step > 0 and step % self.keep_every == 0
            if kept < self.keep_last:
                kept += self._looks_intact(path)  # a damaged one must not push out the one that a resume would need
            elif not milestone:
                aside = self.folder / (path.name + RETIRED)
                path.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
                removed.append(path)
        return removed

    def _looks_intact(self, path: Path) -> bool:
        try:
            manifest.check_sizes(path, manifest.read_manifest(path))
        except InputError:
            return False
        return path not in self._damaged

    def clean(self) -> list[Path]:
        """Remove what dead processes left behind (`.tmp`) and return it. Call it before `newest`, when no save runs.

        A checkpoint that was moved aside for a newer one of the same step which never arrived is put back instead.
        """
        if self.rank != 0 or not self.folder.is_dir():
            return []
        removed = []
        for path in sorted(self.folder.glob("step-*.tmp")):
            final = self.folder / path.name.removesuffix(REPLACED)
            if path.name.endswith(REPLACED) and not final.exists():
                path.rename(final)
                continue
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        return removed


def _tensor_record(tensor: Tensor, shard: Shard | None, file: str) -> dict[str, Any]:
    shape = list(tensor.shape) if shard is None else list(shard.shape)
    rows, offset = (shape[0] if shape else 1, 0) if shard is None else (shard.rows, shard.offset)
    parts = [{"file": file, "offset": offset, "rows": rows}]
    return {"dtype": NAMES[tensor.dtype], "shape": shape, "parts": parts}


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for name, record in more.items():
        known = into.setdefault(name, {**record, "parts": []})
        if (known["dtype"], known["shape"]) != (record["dtype"], record["shape"]):
            raise ValueError(f"tensor '{name}' has another dtype or shape on another rank")
        known["parts"] += record["parts"]


def _check_cover(tensors: dict[str, Any]) -> None:
    """Every row of every tensor must have been written by exactly one rank."""
    for name, record in tensors.items():
        position = 0
        for part in sorted((p for p in record["parts"] if p["rows"]), key=lambda p: p["offset"]):
            if part["offset"] != position:
                raise ValueError(f"tensor '{name}': rows {position} and {part['offset']} do not meet between ranks")
            position += part["rows"]
        if position != (record["shape"][0] if record["shape"] else 1):
            raise ValueError(f"tensor '{name}': {position} rows written, its shape is {record['shape']}")


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _identity(file: Path) -> tuple[Path, int, int]:
    """What changes when a file is written to or replaced."""
    status = file.stat()
    return file, status.st_mtime_ns, status.st_ino
