"""BF16 against FP8, ours and a peer's: arms take turns in processes of their own, medians and spread are compared.

The table is the InfiR2 paper's: forward, backward and their sum, peak memory, throughput, each with the ratio to our
BF16. What the paper's repository reports is put beside it, and called comparable only if its settings are.
"""

from __future__ import annotations

import dataclasses
import statistics
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ..errors import InputError, MachineError
from .arm import PHASES, ArmSpec, ArmTimes
from .child import Child
from .clocks import Load, together

OURS, PEER = "infir2_core.bench.arm", "infir2_core.bench.peer"
PEER_NAME = "megatron-te"


@dataclass(frozen=True)
class Arm:
    """One row: a name, the module that measures it and what it measures."""

    name: str
    module: str
    spec: ArmSpec


@dataclass
class Row:
    """Medians of one arm over all turns.

    Attributes:
        name: of the arm.
        steps: that were timed, over all turns.
        ms: phase -> median milliseconds, with `forward+backward` and `step`.
        spread: the same keys -> [least, most].
        ratio: each median over that of the first row, our BF16; `peak_gb` and `tok_per_s` too.
        peak_gb: allocated at most; None on a CPU.
        reserved_gb: reserved at most.
        first_step_s: seconds from a process's start to the end of its first step, in the last turn (caches are warm
            from the first one).
        tok_per_s: of the whole step (of forward and backward where there is no optimizer).
        tflops: model TFLOPS, causal attention counted once.
        clock_mhz: SM clock while the timed steps ran, median of the turns; None where it cannot be read.
        power_w: of the board meanwhile.
        limits: what held the clock down -> share of the readings.
        failed: why there are no figures.
        profile: kernel group -> milliseconds.
        by: GEMM -> implementation.
        versions: package -> version.
    """

    name: str
    steps: int = 0
    ms: dict[str, float] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)
    peak_gb: float | None = None
    reserved_gb: float | None = None
    first_step_s: float = 0.0
    tok_per_s: float = 0.0
    tflops: float = 0.0
    clock_mhz: float | None = None
    power_w: float | None = None
    limits: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    profile: dict[str, float] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def load(self) -> Load:
        """Clock and power as one."""
        return Load(self.clock_mhz, self.power_w, self.limits)


def arms(spec: ArmSpec, recipes: list[str], peer: bool) -> list[Arm]:
    """Our BF16, the recipes, and the peer's BF16 and FP8 (beside `infir2-lean` also with narrow optimizer state).

    Raises:
        InputError: no such recipe, or one that cannot run.
        MachineError: the peer is not installed.
    """
    from ..precision.recipe import load_recipe
    from .peer import missing

    wanted = ["bf16", *(r for r in recipes if r != "bf16")]
    for name in wanted:
        if gaps := load_recipe(name).missing():
            raise InputError(f"recipe '{name}' cannot run: {', '.join(gaps)}", "--recipes", "infir2 recipes list")
    made = [Arm(name, OURS, dataclasses.replace(spec, recipe=name)) for name in wanted]
    if peer:
        if lacks := missing():
            raise MachineError(
                f"the peer needs {' and '.join(lacks)}", "--peer megatron-te", "pip install 'infir2[megatron]'"
            )
        theirs = ["bf16", "fp8", *(["fp8-lean"] if "infir2-lean" in wanted else [])]
        made += [Arm(f"{PEER_NAME} {r}", PEER, dataclasses.replace(spec, recipe=r)) for r in theirs]
    return made


def run(chosen: list[Arm], turns: int, note: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Measures every arm `turns` times, in turn, and compares.

    Raises:
        MachineError: no arm fits the card.
    """
    times: dict[str, list[ArmTimes]] = {arm.name: [] for arm in chosen}
    order = [(turn, arm) for turn in range(turns) for arm in chosen]
    ready: dict[int, Child] = {}

    def start(number: int) -> None:
        turn, arm = order[number]
        profile = arm.spec.profile and turn == turns - 1
        ready[number] = Child(arm.module, dataclasses.replace(arm.spec, profile=profile))

    try:
        for number, (turn, arm) in enumerate(order):
            if times[arm.name] and times[arm.name][-1].failed:
                continue
            note(f"turn {turn + 1} of {turns}: {arm.name}")
            if number not in ready:
                start(number)
            ready[number].tell()
            if number + 1 < len(order) and arm.spec.device != "cpu":
                start(number + 1)  # it imports while this one has the card
            times[arm.name].append(ready[number].result())
            del ready[number]
    finally:
        for child in ready.values():
            child.end()
    rows = [summarise(arm.name, arm.spec, times[arm.name]) for arm in chosen]
    if all(row.failed for row in rows):
        hint = "fewer --layers, a shorter --seq-len, fewer --rows, or --recompute full"
        raise MachineError(f"no arm has a result: {rows[0].failed}", chosen[0].name, hint)
    base = next((row for row in rows if not row.failed), None)
    for row in rows if base is rows[0] else ():
        if not row.failed:
            row.ratio = {phase: row.ms[phase] / rows[0].ms[phase] for phase in row.ms}
            row.ratio["tok_per_s"] = row.tok_per_s / rows[0].tok_per_s
            if row.peak_gb and rows[0].peak_gb:
                row.ratio["peak_gb"] = row.peak_gb / rows[0].peak_gb
    return rows


def summarise(name: str, spec: ArmSpec, turns: list[ArmTimes]) -> Row:
    """Medians and spread over the steps of all turns."""
    from ..config.presets import load_preset

    row = Row(name, failed=next((t.failed for t in turns if t.failed), ""))
    if row.failed:
        return row
    steps = [
        dict(zip(PHASES, step, strict=True)) for t in turns for step in zip(*(t.ms[p] for p in PHASES), strict=True)
    ]
    for step in steps:
        step["forward+backward"] = step["forward"] + step["backward"]
        step["step"] = step["forward+backward"] + step["optimizer"]
    row.steps = len(steps)
    for phase in (*PHASES, "forward+backward", "step"):
        values = [step[phase] for step in steps]
        row.ms[phase], row.spread[phase] = statistics.median(values), [min(values), max(values)]
    memory = [t.peak_gb for t in turns if t.peak_gb is not None]
    row.peak_gb = max(memory) if memory else None
    row.reserved_gb = max((t.reserved_gb for t in turns if t.reserved_gb is not None), default=None)
    shape = load_preset(spec.size).model
    shape = shape.model_copy(update={"layers": spec.layers or shape.layers})
    whole = row.ms["step" if spec.optimizer else "forward+backward"]
    row.tok_per_s = spec.rows * spec.seq_len / whole * 1e3
    row.tflops = row.tok_per_s * shape.flops_per_token(spec.seq_len) / 1e12
    row.first_step_s = turns[-1].first_step_s
    load = together([turn.load for turn in turns])
    row.clock_mhz, row.power_w, row.limits = load.clock_mhz, load.power_w, load.limits
    row.profile, row.by, row.versions = turns[-1].profile, turns[-1].by, turns[-1].versions
    return row


def published(size: str, seq_len: int) -> dict[str, Any] | None:
    """The row that the InfiR2 repository reports for this size and length, with `card`; None when there is none."""
    text = files("infir2_core.bench").joinpath("published.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    row = next((r for r in data["rows"] if r["size"] == size and r["seq_len"] == seq_len), None)
    return None if row is None else row | {"card": data["card"]}


def not_comparable(row: dict[str, Any], rows: int, layers: int, card: str) -> list[str]:
    """Why a published row says nothing about a measurement of ours; empty when the settings match."""
    reasons = [f"TP {row['tp']}"] if row["tp"] != 1 else []
    reasons += [f"MBS {row['micro_batch']}"] if row["micro_batch"] != rows else []
    reasons += [f"{layers} layers here"] if layers else []
    if card not in row["card"]:
        reasons.append(row["card"])
    return [*reasons, "several microbatches a step, number not published"]
