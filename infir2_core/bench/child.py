"""An arm in a process of its own, which may get ready while another arm still has the card.

A process needs many seconds to import its packages before it touches the card. With `--when-told` it does that and
then waits for a line on its standard input.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable

from .arm import ArmSpec, ArmTimes

WHEN_TOLD = "--when-told"


class Child:
    """The process of one arm, started and not yet told to measure."""

    def __init__(self, module: str, spec: ArmSpec) -> None:
        self.module = module
        command = [sys.executable, "-m", module, json.dumps(dataclasses.asdict(spec)), WHEN_TOLD]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def tell(self) -> None:
        """Lets it measure."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died, and `result` says of what

    def result(self) -> ArmTimes:
        """What it measured, or its last words: the other arms' results must not be lost with this one's."""
        out, errors = self._process.communicate()
        last = next((line for line in reversed(out.splitlines()) if line.startswith("{")), "")
        if self._process.returncode or not last:
            tail = "\n".join((errors or out).strip().splitlines()[-5:])
            return ArmTimes(failed=f"{self.module} ended with {self._process.returncode}:\n{tail}")
        return ArmTimes(**json.loads(last))

    def end(self) -> None:
        """Ends it, measured or not."""
        with self._process:
            self._process.kill()


def wait(prepare: Callable[[], None]) -> float:
    """In the child: prepares and waits to be told; the seconds that it waited. Ends the process when nobody is left."""
    if WHEN_TOLD not in sys.argv:
        return 0.0
    prepare()
    ready = time.monotonic()
    if not sys.stdin.readline():
        raise SystemExit(0)
    return time.monotonic() - ready
