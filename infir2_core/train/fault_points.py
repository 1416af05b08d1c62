"""Test instrumentation: named places in the code where a test can make the process die.

The environment variable INFIR2_FAULT holds a comma-separated list of `kind:place[@step=N]`, for example
`kill:save:before-rename@step=20`. Only the kind `kill` is handled here: the process sends itself SIGKILL, which is
what a power cut or an out-of-memory killer looks like (no handler runs, no buffer is flushed). Entries of other kinds
are somebody else's and are left alone. Without the variable a fault point is one dictionary look-up.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "INFIR2_FAULT"


def armed(kind: str, place: str, step: int) -> bool:
    """True when INFIR2_FAULT asks for `kind` at `place`, either at every step or at this `step`."""
    for entry in os.environ.get(VARIABLE, "").split(","):
        name, _, condition = entry.strip().partition("@")
        if name == f"{kind}:{place}" and condition in ("", f"step={step}"):
            return True
    return False


def fault_point(place: str, step: int) -> None:
    """Die by SIGKILL here when a test asked for it; otherwise do nothing."""
    if armed("kill", place, step):
        os.kill(os.getpid(), signal.SIGKILL)
