"""What a person sees while a run trains: one progress bar, notes above it, and the same as text in the attempt's log.

On a terminal the bar is live; elsewhere (a job's log file) a line is printed now and then. In `--json` mode only the
final document goes to stdout.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from . import output

PLAIN_EVERY_S = 15.0
SHOWN = 100  # characters of an answer


class TrainingView:
    """The watcher of the training loop, as a context manager.

    Args:
        steps: last step of the run.
        log: text file that gets everything shown, one line each.
    """

    def __init__(self, steps: int, log: Path) -> None:
        self.steps = steps
        self._log = log.open("a", encoding="utf-8")
        console = output.console()
        self._live = console.is_terminal
        self._plain_at = 0.0
        columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.fields[figures]}"))
        self._bar = Progress(
            *columns, TextColumn("ETA"), TimeRemainingColumn(), console=console, disable=not self._live
        )
        self._task = self._bar.add_task("training", total=steps, figures="preparing")

    def __enter__(self) -> TrainingView:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._log.close()

    def note(self, text: str) -> None:
        """A line for people, above the bar."""
        self._write(text, show=True)

    def gemms(self, rows: list[dict[str, Any]]) -> None:
        """The precision report: what each kind of GEMM ran in, and by which code."""
        for row in rows:
            self.note(f"  {row['count']:4d} {row['gemm']:<5} {row['operands']}  by {row['by']}")

    def step(self, record: dict[str, Any]) -> None:
        """A finished optimizer step."""
        parts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}", f"{record['tok_per_s']:,.0f} tok/s"]
        if "peak_share" in record:
            share = f" ({record['peak_share']:.0%} of bf16 peak)" if record["peak_share"] is not None else ""
            parts.append(f"{record['tflops']:.0f} TFLOPS{share}")
        parts.append(f"{record['memory_gb']:.1f} GB")
        figures = "  ".join(parts)
        self._bar.update(self._task, completed=record["step"], figures=figures)
        now = time.monotonic()
        plain = not self._live and (now - self._plain_at > PLAIN_EVERY_S or record["step"] == self.steps)
        if plain:
            self._plain_at = now
        self._write(f"step {record['step']}/{self.steps}  {figures}", show=plain)
        if record["skipped"]:
            self.note(f"step {record['step']}: the gradient was not finite, nothing was updated")
        elif record["nonfinite_values"]:
            self.note(f"step {record['step']}: {record['nonfinite_values']} infinities or NaNs were quantised")

    def evaluated(self, record: dict[str, Any]) -> None:
        """A validation."""
        self._write(f"step {record['step']}: validation loss {record['loss']:.4f}", show=True)

    def sampled(self, record: dict[str, Any]) -> None:
        """An answer to a fixed prompt: its beginning, one line; all of it is in samples.jsonl."""
        text = " ".join(record["completion"].split())
        end = "" if record["finish"] == "stop" else f" (cut at {record['tokens']} tokens)"
        self._write(f"  answers: {text[:SHOWN]}{'...' if len(text) > SHOWN else ''}{end}", show=True)

    def _write(self, text: str, show: bool) -> None:
        self._log.write(text + "\n")
        self._log.flush()
        if show and not output.json_mode():
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Bar:
    """One bar, shown while the `with` lasts: on a terminal only, and on stderr in `--json` mode."""

    def __init__(self, what: str, *columns: ProgressColumn) -> None:
        console = output.console()
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class BytesBar(_Bar):
    """A progress bar over bytes for work that reads and writes files, as a context manager.

    On a terminal only, and on stderr in `--json` mode.
    """

    def __init__(self, what: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        super().__init__(what, *columns, TimeRemainingColumn())

    def update(self, done: int, total: int, what: str | None = None) -> None:
        """`done` of `total` bytes; `what` replaces the text before the bar."""
        self._bar.update(self._task, completed=done, total=total, description=what)


class RecordsBar(_Bar):
    """A count of records read, while data of unknown length is; on a terminal only, on stderr in `--json` mode."""

    def __init__(self, what: str) -> None:
        super().__init__(what, SpinnerColumn(), TextColumn("{task.description}  {task.completed:,} records"))

    def update(self, done: int) -> None:
        """`done` records so far."""
        self._bar.update(self._task, completed=done)
