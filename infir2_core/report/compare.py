"""Two or more runs side by side: losses at equal steps, speed, memory, and which settings differ.

The run named before the others is the base. Held-out losses are compared in pairs, step by step: with the same seed and
data both runs saw the same tokens, so the noise of the data cancels in each difference and a small one means something.
The figures of `last` cover the last five common evaluations, where the runs have settled.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..runs import Run, values
from .curves import differences, smooth

LAST = 5
ROWS = 8  # steps shown in the table of losses
NAMES_ONLY = ("name", "runs")  # settings that say where a run is, not what it does


@dataclass(frozen=True)
class Paired:
    """Paired held-out losses of two runs over `count` evaluations.

    `mean` is the mean of (other - base) in nats per token, `relative` the same in % of the base's mean loss, `stderr`
    the standard error of `relative` over the evaluations (None for fewer than two). Evaluations of one run are not
    independent; an error bar over seeds needs runs with several seeds.
    """

    count: int
    mean: float
    relative: float
    stderr: float | None


@dataclass(frozen=True)
class Against:
    """One run against the base. Ratios are other / base and None where one of the two was not measured."""

    name: str
    recipe: str
    every: Paired | None
    last: Paired | None
    tok_per_s_ratio: float | None
    memory_ratio: float | None
    settings: dict[str, list[Any]]


@dataclass(frozen=True)
class Comparison:
    """`losses` has one entry a step: {"step", "train": {run: loss or None}, "eval": {run: loss or None}}."""

    base: str
    losses: list[dict[str, Any]]
    against: list[Against]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(runs: list[Run]) -> Comparison:
    """Compare `runs` with the base, `runs[0]`.

    Raises:
        UsageError: fewer than two runs, or one of them twice.
    """
    if len(runs) < 2:
        raise UsageError("comparing needs at least two runs", "", "infir2 runs compare A B")
    names = labels(runs)
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise UsageError("the same run was given twice", ", ".join(names))
    against = [_against(runs[0], run, name) for run, name in zip(runs[1:], names[1:], strict=True)]
    return Comparison(names[0], _losses(runs, names), against)


def labels(runs: list[Run]) -> list[str]:
    """Run names, with their folder where two runs have the same name."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.path) for run in runs]


def paired(pairs: list[tuple[int, float, float]]) -> Paired | None:
    """Statistics of (step, base loss, other loss); None when there are none."""
    if not pairs:
        return None
    base = statistics.fmean(a for _, a, _ in pairs)
    deltas = [b - a for _, a, b in pairs]
    stderr = statistics.stdev(deltas) / math.sqrt(len(deltas)) if len(deltas) > 1 else None
    return Paired(
        count=len(deltas),
        mean=statistics.fmean(deltas),
        relative=100 * statistics.fmean(deltas) / base,
        stderr=None if stderr is None else 100 * stderr / base,
    )


def settings_that_differ(base: Run, other: Run) -> dict[str, list[Any]]:
    """Dotted key -> [value of base, value of other], for every setting that changes what is trained."""
    left, right = (
        _flat(base.config.model_dump(mode="json", exclude_none=True)),
        _flat(other.config.model_dump(mode="json", exclude_none=True)),
    )
    keys = [key for key in {**left, **right} if key not in NAMES_ONLY]
    return {key: [left.get(key), right.get(key)] for key in keys if left.get(key) != right.get(key)}


def _against(base: Run, other: Run, name: str) -> Against:
    pairs = differences(base, other)
    return Against(
        name=name,
        recipe=other.recipe,
        every=paired(pairs),
        last=paired(pairs[-LAST:]),
        tok_per_s_ratio=_ratio(base, other, "tok_per_s", statistics.median),
        memory_ratio=_ratio(base, other, "memory_gb", max),
        settings=settings_that_differ(base, other),
    )


def _ratio(base: Run, other: Run, key: str, of: Any) -> float | None:
    left, right = values(base.steps, key), values(other.steps, key)
    return of(right) / of(left) if left and right and of(left) else None


def _losses(runs: list[Run], names: list[str]) -> list[dict[str, Any]]:
    train = []
    for run in runs:
        steps = [record["step"] for record in run.steps]
        raw = [next(iter(values([record], "loss")), math.nan) for record in run.steps]
        train.append(dict(zip(steps, smooth(raw, max(1, len(raw) // 50)), strict=True)))
    held_out = [{r["step"]: r["loss"] for r in run.evals if values([r], "loss")} for run in runs]
    common = sorted(set.intersection(*(set(losses) for losses in held_out)))
    common = common or sorted(set.intersection(*(set(losses) for losses in train)))
    if len(common) > ROWS:
        common = [common[round(index * (len(common) - 1) / (ROWS - 1))] for index in range(ROWS)]
    return [
        {
            "step": step,
            "train": {name: _known(losses.get(step)) for name, losses in zip(names, train, strict=True)},
            "eval": {name: losses.get(step) for name, losses in zip(names, held_out, strict=True)},
        }
        for step in common
    ]


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _flat(content: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        return {prefix: content}
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def flat_settings(run: Run) -> dict[str, Any]:
    """All settings of a run under dotted keys."""
    return _flat(run.config.model_dump(mode="json", exclude_none=True))


def folder_size(path: Path) -> int:
    """Bytes of the files directly in `path`."""
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
