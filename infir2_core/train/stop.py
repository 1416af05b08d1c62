"""Being asked to stop: by SIGTERM or SIGUSR1 (schedulers), SIGINT (ctrl-C), or a file named `stop` in the run folder.

A request only sets a flag. The loop looks at it between steps, saves a checkpoint and leaves with exit code 75; nothing
is interrupted half way. Whoever does not want to wait presses ctrl-C again: the second SIGINT raises KeyboardInterrupt.

With several ranks each has a StopRequest of its own and the loop combines them, so that all stop at the same step.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

FILE = "stop"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Context manager around the training loop; must be entered in the main thread, as Python's signals demand.

    Leaving it puts the earlier signal handlers back. The `stop` file is removed when the loop that honoured it leaves
    without an exception, so that the next start of the run trains on; a crash on the way leaves the request standing.
    """

    def __init__(self, run_dir: Path) -> None:
        self.file = run_dir / FILE
        self._reason: str | None = None
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not installed from Python and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
        if kind is None and self._reason is not None:
            self.file.unlink(missing_ok=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self._reason = self._reason or signal.Signals(number).name

    def requested(self) -> str | None:
        """Why the run should stop ("SIGTERM", "file RUN/stop"), or None. Costs one look at the file system."""
        if self._reason is None and self.file.exists():
            self._reason = f"file {self.file}"
        return self._reason
