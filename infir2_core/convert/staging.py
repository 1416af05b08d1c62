"""A folder in the making: written aside, resumable file by file, and under its final name only when it is whole.

    OUT.partial/             everything that is finished so far
               /.infir2/     plan.json: what is being made of what; NAME.json: record of each finished file; the lock
    OUT.partial.infir2/      .infir2 during the last step, so that OUT never has it
    OUT/                     the same folder after one rename, without .infir2

The same command continues a partial folder; a command with other settings is told about it. When the input turns out
to be bad, nothing of it is kept.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import NO_ROOM, Infir2Error, InputError

JOURNAL, PLAN = ".infir2", "plan.json"
MARGIN = 1 << 20  # room asked for beside the files: index, configs, directory blocks


def check_out(out: Path, source: Path | None = None) -> None:
    """Refuses an output folder that exists, or that is, contains or lies in the source.

    Raises:
        InputError: with what to do instead.
    """
    if source is not None:
        there, here = (Path(os.path.realpath(path)) for path in (source, out))  # `resolve` stumbles over loops
        if here == there or here in there.parents:
            raise InputError("the output would be written over the source", str(out), "choose another output folder")
        if there in here.parents:
            raise InputError("the output lies inside the source", str(out), "choose another output folder")
    if out.exists() or out.is_symlink():
        raise InputError("the output folder exists already", str(out), f"choose another one, or: rm -r {out}")


class Staging:
    """The output folder `out` while it is made, as a context manager.

    Args:
        out: final path; must not exist.
        plan: JSON values that say what is made of what; an earlier attempt with the same plan is continued.
        nbytes: size of everything that will be written.
        source: folder that is read, which `out` may not cover.

    Raises:
        InputError: `out` exists, another process makes it, an attempt with another plan is in the way, or there is no
            room for it.
    """

    def __init__(self, out: Path, plan: dict[str, Any], nbytes: int, source: Path | None = None) -> None:
        check_out(out, source)
        self.out, self.path = out, out.with_name(out.name + ".partial")
        self._journal, self._left = self.path / JOURNAL, self.path.with_name(self.path.name + JOURNAL)
        self._made = False  # everything that was asked for is in the folder
        self._plan, self._nbytes, self._lock = plan, nbytes, -1

    def __enter__(self) -> Staging:
        try:
            self._open()
        except BaseException:
            self._unlock()
            raise
        return self

    def _open(self) -> None:
        plan = json.dumps(self._plan, indent=1, sort_keys=True)
        known, there = self._journal / PLAN, self.path.exists()
        if self._left.is_dir() and not self._journal.exists():
            self._take_lock(self._left)
            if there:  # ended between the two renames of `publish`
                self._left.rename(self._journal)
            else:  # ended after them
                shutil.rmtree(self._left, ignore_errors=True)
                self._unlock()
        if there and not self._journal.is_dir():
            raise InputError("something else has the name of the unfinished output", str(self.path), "move it away")
        self._journal.mkdir(parents=True, exist_ok=True)
        if self._lock < 0:
            self._take_lock(self._journal)
        if known.is_file() and known.read_bytes() != plan.encode():
            raise self._other_plan(known.read_text(encoding="utf-8", errors="replace"), plan)
        done = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        free = shutil.disk_usage(self.path).free
        if free + done < self._nbytes + MARGIN:
            if not known.is_file():
                shutil.rmtree(self.path, ignore_errors=True)
            raise no_room(self.out, self._nbytes + MARGIN - done, free)
        if not known.is_file():
            write_whole(known, plan)

    def _other_plan(self, known: str, plan: str) -> InputError:
        """The error of an unfinished output that this command does not continue."""
        try:
            before, now = json.loads(known), json.loads(plan)
            differing = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
        except (ValueError, AttributeError):
            differing = {"version"}
        rid = f"rm -r {self.path}"
        if "source" not in differing and differing & {"files", "identity"}:  # no command goes on with that
            return InputError("the source has changed since this output was begun", str(self.path), rid)
        if "version" in differing:
            return InputError(
                "an unfinished output of another version of infir2, or a damaged one, is in the way",
                str(self.path),
                rid,
            )
        what = "an unfinished output of other settings is in the way"
        return InputError(what, str(self.path), f"repeat that command to finish it, or: {rid}")

    def _take_lock(self, journal: Path) -> None:
        self._lock = os.open(journal / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError("another process is writing this output", str(self.path), "wait for it") from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            self._unlock()
            needed = self._nbytes - sum(path.stat().st_size for path in self.path.iterdir() if path.is_file())
            raise no_room(self.out, needed, shutil.disk_usage(self.path).free) from error
        if isinstance(error, KeyboardInterrupt):
            error.add_note("the same command goes on where this one ended")
        if isinstance(error, Infir2Error) and not self._made:  # what comes of a bad source is of no use
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def finished(self, name: str) -> dict[str, Any] | None:
        """The record of a file that an earlier attempt finished; None when it must be made."""
        try:
            record: dict[str, Any] = json.loads((self._journal / f"{name}.json").read_text(encoding="utf-8"))
            whole = (self.path / name).stat().st_size == record["bytes"]
        except (OSError, ValueError, KeyError):
            return None
        return record if whole else None

    def aside(self, name: str) -> Path:
        """Where to write file `name` until `finish`."""
        return self._journal / f"{name}.part"

    def finish(self, name: str, record: dict[str, Any]) -> None:
        """File `name`, written and fsynced at `aside(name)`, is whole: give it its name and keep its record."""
        aside = self.aside(name)
        entry = record | {"bytes": aside.stat().st_size}
        aside.rename(self.path / name)
        write_whole(self._journal / f"{name}.json", json.dumps(entry))

    def publish(self) -> None:
        """Everything is there: the folder gets its final name. The same command finishes what ends on the way.

        Raises:
            InputError: something has taken the name meanwhile; the finished files are kept.
        """
        self._made = True
        if self.out.exists() or self.out.is_symlink():
            raise self._taken()
        sync_folder(self.path)
        self._journal.rename(self._left)
        try:
            self.path.rename(self.out)
        except OSError as error:
            self._left.rename(self._journal)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise self._taken() from None
            raise
        sync_folder(self.out.parent)
        shutil.rmtree(self._left, ignore_errors=True)

    def _taken(self) -> InputError:
        what = f"something has taken the name of the output meanwhile; all that was made is kept in {self.path}"
        return InputError(what, str(self.out), f"mv {self.out} elsewhere, then type the same command again")


def no_room(out: Path, needed: int, free: int) -> InputError:
    """The error of a disk that is too small; what is finished stays and is continued by the same command."""
    what = f"no room for the output: it needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
    return InputError(what, str(out), "free some space or choose another folder, then type the same command again")


def write_whole(path: Path, text: str) -> None:
    """Write a small text file that appears complete or not at all."""
    aside = path.with_name(path.name + ".part")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def write_text(path: Path, text: str) -> None:
    """As `write_whole`, for a file that nothing continues: nothing of a failed attempt is kept.

    Raises:
        InputError: no room.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        path.with_name(path.name + ".part").unlink(missing_ok=True)
        if error.errno not in NO_ROOM:
            raise
        hint = "free some space or choose another folder, then type the same command again"
        raise InputError("no room for the file on its disk", str(path), hint) from error


def copy_file(source: Path, target: Path) -> None:
    """Copy a side file and its mode; links are followed, the copy is forced to the disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".part")
    shutil.copy2(source, aside)
    descriptor = os.open(aside, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    aside.rename(target)


def sync_folder(path: Path) -> None:
    """Force a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
