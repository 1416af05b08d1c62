"""The errors a user may see, and the exit code each one carries.

Every error says what is wrong, where it was found (file, line, key, flag) and what to type next. The command line turns
an `Infir2Error` into those three lines and its exit code; anything else is a bug of ours and exits 1.

Exit codes: 0 done, 1 our bug, 2 usage, 3 bad input or config, 4 the machine lacks something, 5 training diverged,
75 stopped on request with a resumable checkpoint. (Ctrl-C outside training exits 130, as in shells.)
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

STOPPED = 75
# What the system says when there is no room: a full disk, a quota, a limit on the size of files.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Infir2Error(Exception):
    """Base class.

    Args:
        what: one sentence on what is wrong.
        where: file, line, key or flag; empty when `what` already says it.
        hint: what to type or change next.
    """

    exit_code = 1

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.where, self.hint) if part)


class UsageError(Infir2Error):
    """The command line itself makes no sense (flags that exclude each other, a missing argument)."""

    exit_code = 2


class InputError(Infir2Error):
    """A file, setting, checkpoint or data set is wrong."""

    exit_code = 3


class MachineError(Infir2Error):
    """The machine lacks something: a GPU, a package, disk space."""

    exit_code = 4


class DivergedError(Infir2Error):
    """Training produced non-finite values more often than the run allows."""

    exit_code = 5


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt `word`: the closest valid one when there is one, and the whole list when it is short."""
    options = sorted(valid)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    listed = f" Valid: {', '.join(options)}." if len(options) <= 40 else ""
    return (f"Did you mean '{close[0]}'?" if close else "") + listed
