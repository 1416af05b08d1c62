"""The metrics of a run: one JSON object a line in RUN/metrics.jsonl, mirrored to TensorBoard.

Everything infir2 shows about a run is drawn from this file, so it has to stay true across kills and resumes: each line
is flushed as it is written, and a run that resumes from step N drops every later line in one atomic step, because those
steps are about to be done again. The file then equals that of a run which was never interrupted.

Lines are standard JSON. A loss that is not finite is written as null, and its key is listed under "nonfinite":
{"kind": "step", "step": 7, "loss": null, "nonfinite": ["loss"], ...}.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError

if TYPE_CHECKING:
    from types import TracebackType

FILE = "metrics.jsonl"
SAMPLES = "samples.jsonl"  # answers of fine-tuning to fixed prompts (answers.py)


class MetricsLog:
    """Appends to the metrics of one run; only one process of a run may hold one.

    Args:
        run_dir: the run folder; created if need be.
        resume_step: the step of the checkpoint that training goes on from: lines of later steps are dropped. None: the
            run starts from nothing, and so does the file.
        tensorboard: mirror to RUN/tensorboard; `note` says so when the package is not there.
        file: another name for a file of lines that have a kind and a step.

    Raises:
        InputError: a line already in the file is damaged (a torn last line is dropped instead).
        MachineError: the disk is full or failing.
    """

    def __init__(self, run_dir: Path, resume_step: int | None, tensorboard: bool = True, file: str = FILE) -> None:
        self.path = run_dir / file
        self.note = ""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._cut(resume_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._writer: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self.note = "TensorBoard events are not written: the package 'tensorboard' is not installed"
            else:
                purge = None if resume_step is None else resume_step + 1
                self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge, flush_secs=30)

    def _cut(self, resume_step: int | None) -> None:
        lines = _lines(self.path)
        kept = [line for line, record in lines if resume_step is not None and record["step"] <= resume_step]
        aside = self.path.with_suffix(".jsonl.tmp")
        with aside.open("wb") as file:
            file.writelines(line + b"\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(self.path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. `record` has "kind" (such as "step") and "step", and JSON values or scalar tensors."""
        nonfinite: list[str] = []
        plain = _plain(dict(record), "", nonfinite)
        if nonfinite:
            plain["nonfinite"] = nonfinite
        try:
            self._file.write(json.dumps(plain, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise MachineError(f"the metrics cannot be written: {error.strerror}", str(self.path)) from error
        if self._writer is not None:
            group = "eval" if record["kind"] == "eval" else "train"
            for name, value in plain.items():
                if isinstance(value, int | float) and name not in ("step", "time"):
                    self._writer.add_scalar(f"{group}/{name}", value, plain["step"], walltime=plain.get("time"))

    def close(self) -> None:
        """Flush everything; further calls do nothing."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _plain(value: Any, path: str, nonfinite: list[str]) -> Any:
    """`value` as standard JSON; the dotted paths of floats that are not finite are added to `nonfinite`."""
    if hasattr(value, "item"):  # a scalar of torch or NumPy
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}" if path else str(key), nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}.{index}", nonfinite) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(path)
        return None
    return value


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """All whole lines with what they say. A last line without its newline was cut off by a kill and is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"the metrics cannot be read: {error.strerror}", str(path)) from error
    whole = data[: data.rfind(b"\n") + 1]
    found = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line, parse_constant=_refuse_constant)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int) or "kind" not in record:
                raise ValueError("no object with 'kind' and 'step'")
        except ValueError as error:
            raise InputError(
                f"a line of the metrics is damaged: {error}", f"{path}:{number}", "delete that line, or the file"
            ) from error
        found.append((line, record))
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not standard JSON")


def read_metrics(run_dir: Path, file: str = FILE) -> list[dict[str, Any]]:
    """All records of a run in the order written; [] when there are none yet. Safe while the run is going on.

    Raises:
        InputError: with file and line, when a line other than a torn last one is damaged.
    """
    return [record for _, record in _lines(run_dir / file)]
