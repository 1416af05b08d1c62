"""Run folders: who holds one, what is in it, how far it got, and how a name typed by a person leads to it.

    RUNS/NAME/config.toml           the resolved settings; a folder with this file is a run
             /lock                  held by flock while a process trains; what it says is for people
             /logs/attempt-1/       rank-0.exit.json: how each rank of each start ended
             /metrics.jsonl, checkpoints/, tensorboard/, report.html

Nothing here trains or needs torch: `infir2 runs list` has to answer at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .errors import STOPPED, InputError, MachineError, nearest
from .train.manifest import newest_complete, step_folders
from .train.metrics import read_metrics

if TYPE_CHECKING:
    from .config.schema import RunConfig

CONFIG, LOCK = "config.toml", "lock"

_held: set[int] = set()  # descriptors of the locks that this process holds


def _let_go_in_child() -> None:
    # flock belongs to the open file, which a forked child shares: a data worker that outlives a killed trainer would
    # keep the run locked. Closing the child's copy leaves the parent's lock alone.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


class RunLock:
    """Holds a run folder for this process, as a context manager; the system lets go when the process dies.

    Raises:
        InputError: another live process holds it (its pid is named).
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOCK
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except PermissionError as error:
            raise InputError("no permission to write in the run folder", str(self.path.parent)) from error
        except OSError as error:
            raise MachineError(f"the run folder cannot be locked: {error.strerror}", str(self.path)) from error
        for attempt in range(5):  # `runs list` takes the lock for an instant to see whether anybody holds it
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if attempt < 4:
                    time.sleep(0.05)
        else:
            holder = os.read(descriptor, 1000).decode("utf-8", "replace").strip()
            os.close(descriptor)
            raise InputError(
                f"another process is training in this run folder ({holder or 'pid unknown'})",
                str(self.path.parent),
                f"wait for it, or stop it with a checkpoint: touch {self.path.parent / 'stop'}",
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        _held.add(descriptor)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            _held.discard(self._descriptor)
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


def holder_of(run_dir: Path) -> str | None:
    """Who trains in `run_dir` right now ("pid 123 on host"), or None."""
    try:
        descriptor = os.open(run_dir / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.read(descriptor, 1000).decode("utf-8", "replace").strip() or "pid unknown"
    finally:
        os.close(descriptor)
    return None


# Attempts: every start of a run leaves how it ended


@dataclass(frozen=True)
class Attempt:
    """One start of a run. `exit_codes` maps rank to exit code; ranks that died without a word are absent."""

    number: int
    path: Path
    exit_codes: dict[int, int] = field(default_factory=dict)
    what: str = ""

    @property
    def exit_code(self) -> int | None:
        """The code that counts: a real failure before a stop, a stop before success; None when nothing was written."""
        codes = self.exit_codes.values()
        return next((code for code in codes if code not in (0, STOPPED)), max(codes, default=None))


def start_attempt(run_dir: Path) -> Path:
    """Create and return the next RUN/logs/attempt-N."""
    number = max((attempt.number for attempt in attempts(run_dir)), default=0) + 1
    path = run_dir / "logs" / f"attempt-{number}"
    path.mkdir(parents=True)
    return path


def write_exit(attempt_dir: Path, rank: int, exit_code: int, what: str = "") -> None:
    """Leave how `rank` ended, in `rank-R.exit.json`; appears whole or not at all."""
    file = attempt_dir / f"rank-{rank}.exit.json"
    aside = file.with_suffix(".part")
    aside.write_text(json.dumps({"exit_code": exit_code, "what": what, "time": time.time()}) + "\n", "utf-8")
    aside.rename(file)


def attempts(run_dir: Path) -> list[Attempt]:
    """All starts of a run, oldest first."""
    found = []
    for path in (run_dir / "logs").glob("attempt-*"):
        number = path.name.removeprefix("attempt-")
        if not number.isdigit():
            continue
        codes: dict[int, int] = {}
        what = ""
        for file in sorted(path.glob("rank-*.exit.json")):
            try:
                record = json.loads(file.read_text("utf-8"))
                codes[int(file.name.split("-")[1].split(".")[0])] = int(record["exit_code"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # an unreadable note is no note: the rank counts as one that died without a word
            what = what or str(record.get("what", ""))
        found.append(Attempt(int(number), path, dict(sorted(codes.items())), what))
    return sorted(found, key=lambda attempt: attempt.number)


# What a run is and how far it got


def read_config(run_dir: Path) -> RunConfig:
    """The resolved settings of a run.

    Raises:
        InputError: config.toml is missing, is no TOML, or does not follow the schema (line and key are named).
    """
    from .config import runfile

    if not (run_dir / CONFIG).is_file():
        raise InputError("this is not a run folder: it has no config.toml", str(run_dir), "infir2 runs list")
    return runfile.read_config(run_dir / CONFIG)


@dataclass(frozen=True)
class Run:
    """Everything that the reports draw: settings, metrics, attempts, checkpoints."""

    path: Path
    config: RunConfig
    metrics: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.path.name

    @property
    def recipe(self) -> str:
        """Name of the precision recipe."""
        return str(self.config.train.recipe)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Metrics of kind "step"."""
        return [record for record in self.metrics if record["kind"] == "step"]

    @property
    def evals(self) -> list[dict[str, Any]]:
        """Metrics of kind "eval"."""
        return [record for record in self.metrics if record["kind"] == "eval"]

    @property
    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, newest first, intact or not."""
        return step_folders(self.path / "checkpoints")


def read_run(run_dir: Path) -> Run:
    """Read a run folder; InputError when its settings or metrics are damaged."""
    return Run(run_dir, read_config(run_dir), read_metrics(run_dir))


@dataclass(frozen=True)
class Summary:
    """One line of `runs list`. Losses in nats per token, throughput the median over steps, memory the peak in GB.

    Shares are those of fine-tuning, means over steps: fillers among what was computed, trained tokens among all.

    `status` is one of new, running, stopped (on request, resumable), crashed, finished, unreadable.
    """

    name: str
    path: str
    status: str
    stage: str = ""
    size: str = ""
    recipe: str = ""
    steps_done: int = 0
    steps_planned: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    tokens: int = 0
    tok_per_s: float | None = None
    memory_gb: float | None = None
    padding_share: float | None = None
    trained_share: float | None = None
    skipped: int = 0
    attempts: int = 0
    updated: float = 0.0
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def values(records: list[dict[str, Any]], key: str) -> list[float]:
    """The numbers under `key`, in order; records without one (absent or null) are passed over."""
    return [record[key] for record in records if isinstance(record.get(key), int | float)]


def summarise(run_dir: Path) -> Summary:
    """Summary of a run folder; a damaged one gets status "unreadable" and its problem, it raises nothing."""
    try:
        run = read_run(run_dir)
    except InputError as error:
        where = f" ({error.where})" if error.where else ""
        return Summary(run_dir.name, str(run_dir), "unreadable", problem=f"{error.what}{where}")
    steps, evals, tries = run.steps, run.evals, attempts(run_dir)
    done = steps[-1]["step"] if steps else 0
    planned = run.config.train.steps
    metrics_file = run_dir / "metrics.jsonl"
    throughput, memory = values(steps, "tok_per_s"), values(steps, "memory_gb")
    return Summary(
        name=run.name,
        path=str(run_dir),
        status=_status(run_dir, tries, done, planned),
        stage=run.config.title,
        size=run.config.size,
        recipe=run.recipe,
        steps_done=done,
        steps_planned=planned,
        loss=next(iter(values(steps[::-1], "loss")), None),
        eval_loss=next(iter(values(evals[::-1], "loss")), None),
        tokens=int(max(values(steps, "tokens"), default=0)),
        tok_per_s=statistics.median(throughput) if throughput else None,
        memory_gb=max(memory, default=None),
        padding_share=_mean(values(steps, "padding_share")),
        trained_share=_mean(values(steps, "trained_share")),
        skipped=sum(record.get("skipped") is True for record in steps),
        attempts=len(tries),
        updated=(metrics_file if metrics_file.exists() else run_dir / CONFIG).stat().st_mtime,
        problem=tries[-1].what if tries and tries[-1].exit_code not in (0, STOPPED) else "",
    )


def _mean(numbers: list[float]) -> float | None:
    return statistics.fmean(numbers) if numbers else None


def _status(run_dir: Path, tries: list[Attempt], done: int, planned: int) -> str:
    if holder_of(run_dir) is not None:
        return "running"
    code = tries[-1].exit_code if tries else None
    if code == STOPPED:
        return "stopped"
    if code == 0 or (code is None and done >= planned):
        return "finished"
    return "crashed" if tries or done else "new"


def list_runs(runs_dir: Path) -> list[Summary]:
    """Every run below `runs_dir`, most recently active at the end.

    Raises:
        InputError: `runs_dir` is not a folder.
    """
    if not runs_dir.is_dir():
        raise InputError("there is no such folder of runs", str(runs_dir), "infir2 cpt --size tiny  starts a run")
    found = [summarise(path) for path in runs_dir.iterdir() if (path / CONFIG).is_file()]
    return sorted(found, key=lambda summary: (summary.updated, summary.name))


def resolve_run(ref: str | None, runs_dir: Path) -> Path:
    """The run folder meant by `ref`: a path, a name in `runs_dir`, or a beginning that only one name has.

    None means the run of `runs_dir` that was written to last.

    Raises:
        InputError: none or several match; the hint names what is there.
    """
    if ref is not None and (Path(ref) / CONFIG).is_file():
        return Path(ref)
    names = sorted(p.name for p in runs_dir.iterdir() if (p / CONFIG).is_file()) if runs_dir.is_dir() else []
    if ref is None:
        if not names:
            raise InputError("there is no run yet", str(runs_dir), "infir2 cpt --size tiny")
        return max((runs_dir / name for name in names), key=_last_written)
    if ref in names:
        return runs_dir / ref
    matches = [name for name in names if name.startswith(ref)]
    if len(matches) == 1:
        return runs_dir / matches[0]
    if matches:
        raise InputError(f"'{ref}' could be any of {len(matches)} runs", str(runs_dir), f"Valid: {', '.join(matches)}.")
    if not names:
        raise InputError(f"there is no run '{ref}': no run at all", str(runs_dir), "infir2 cpt --size tiny")
    raise InputError(f"there is no run '{ref}'", str(runs_dir), nearest(ref, names))


def _last_written(run_dir: Path) -> float:
    log = run_dir / "metrics.jsonl"
    return (log if log.exists() else run_dir / CONFIG).stat().st_mtime


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Newest complete checkpoint of a run by manifest and file sizes; hashes are checked by whoever loads it."""
    return newest_complete(run_dir / "checkpoints")


def default_runs_dir(start: Path) -> Path:
    """`[project] runs` of the project file in `start` or above it, else `runs` in `start`.

    Raises:
        InputError: the project file is damaged or has wrong keys.
    """
    from .config.project import find_project, load_project

    file = find_project(start)
    if file is None:
        return start / "runs"
    project = load_project(file)
    return project.folder / project.project.runs
