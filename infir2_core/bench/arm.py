"""One arm of a comparison in a process of its own: builds a model, takes steps, prints what they cost as JSON.

    python -m infir2_core.bench.arm '{"size": "1.5b", "recipe": "infir2", ...}'

A process for each arm and turn gives each the whole card, so that arms which do not fit beside each other can still be
interleaved. A step begins with the batch on the device and ends with weights that are ready for the next forward.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .clocks import Load, Meter

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class ArmSpec:
    """What one arm measures.

    Attributes:
        size: preset.
        recipe: of the native engine.
        seq_len: tokens of a sequence.
        rows: sequences of a microbatch; one microbatch is one step.
        layers: instead of the preset's; 0 for those.
        optimizer: whole steps; without, forward and backward alone and no optimizer state.
        warmup: steps before the timed ones, which compile and settle the allocator.
        steps: timed steps.
        after: training steps before all of these: GEMM rates depend on the data.
        recompute: none, selective or full.
        device: `cuda:0` or `cpu`.
        profile: also one step under the profiler.
    """

    size: str
    recipe: str
    seq_len: int
    rows: int
    layers: int = 0
    optimizer: bool = True
    warmup: int = 3
    steps: int = 5
    after: int = 0
    recompute: str = "none"
    device: str = "cuda:0"
    profile: bool = False


@dataclass
class ArmTimes:
    """What an arm's steps cost.

    Attributes:
        ms: phase -> milliseconds of each timed step.
        peak_gb: largest allocated memory, GB of 2**30; None on a CPU.
        reserved_gb: largest reserved memory.
        first_step_s: seconds from the start of the process until its first step was done.
        losses: of the timed steps, in nats.
        parameters: count.
        versions: package -> version.
        clock_mhz: median SM clock while the timed steps ran; None where it cannot be read.
        power_w: median power of the board meanwhile.
        limits: what held the clock down -> share of the readings.
        profile: kernel group -> milliseconds, with `span` and `gaps`.
        by: GEMM label, or `attention` -> implementation.
        failed: why there are no times, for people; empty when there are.
    """

    ms: dict[str, list[float]] = field(default_factory=dict)
    peak_gb: float | None = None
    reserved_gb: float | None = None
    first_step_s: float = 0.0
    losses: list[float] = field(default_factory=list)
    parameters: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    clock_mhz: float | None = None
    power_w: float | None = None
    limits: dict[str, float] = field(default_factory=dict)
    profile: dict[str, float] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    failed: str = ""

    @property
    def load(self) -> Load:
        """Clock and power as one."""
        return Load(self.clock_mhz, self.power_w, self.limits)

    @load.setter
    def load(self, load: Load) -> None:
        self.clock_mhz, self.power_w, self.limits = load.clock_mhz, load.power_w, load.limits


class Clock:
    """Time between marks, by device events on a GPU and by the wall on a CPU."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self._marks = cuda, []  # type: ignore[var-annotated]

    def mark(self, _phase: str = "") -> None:
        """Ends a phase."""
        if self.cuda:
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Milliseconds between the marks so far, which are forgotten."""
        marks, self._marks = self._marks, []
        if not self.cuda:
            return [1e3 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
        marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]


def by_phase(intervals: list[float]) -> dict[str, list[float]]:
    """Milliseconds of each phase in each step, of marks at the beginning of a step and at the end of each phase."""
    marks = len(PHASES) + 1  # the last interval of a step lies between it and the next
    return {phase: intervals[i::marks] for i, phase in enumerate(PHASES)}


def since_start(waited: float) -> float:
    """Seconds since this process was started, without those in which it waited for its turn."""
    import psutil

    return time.time() - psutil.Process().create_time() - waited


def text_tokens(count: int) -> list[int]:
    """`count` bytes of the standard library's own sources, always the same: real text without a download."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= count:
            return list(found[:count])
    return list((found * (count // len(found) + 1))[:count])


def measure(spec: ArmSpec, waited: float = 0.0) -> ArmTimes:
    """Runs one arm in this process, which waited so many seconds for its turn."""
    import torch

    from ..config.presets import load_preset
    from ..config.schema import Blend, RunConfig, Source
    from ..data.batch import rows_to_batch
    from ..engines.native import NativeEngine
    from ..engines.ranks import Ranks
    from ..launch.plan import excess_bytes
    from ..ops.attention import implementation as implementation_of
    from ..ops.dispatch import ledger
    from ..precision.recipe import load_recipe

    preset, cuda = load_preset(spec.size), spec.device.startswith("cuda")
    shape = preset.model.model_copy(update={"layers": spec.layers or preset.model.layers})
    total = 1 + spec.after + spec.warmup + spec.steps
    tokens = torch.tensor(text_tokens(total * spec.rows * (spec.seq_len + 1)), dtype=torch.int64)
    rows = tokens.view(total, spec.rows, spec.seq_len + 1)
    batches = iter([rows_to_batch(list(step)).to(spec.device) for step in rows])
    update = {"recipe": spec.recipe, "recompute": spec.recompute, "seq_len": spec.seq_len}
    update |= {"micro_batch": spec.rows, "global_batch": spec.rows}
    config = RunConfig(
        name="bench",
        runs="-",
        size=spec.size,
        model=shape,
        source=Source(kind="scratch"),
        data=[Blend(prefix="-", weight=1.0, content="")],
        cpt=preset.cpt.model_copy(update=update),
        ranks=1,
    )
    if cuda and spec.optimizer:
        room = torch.cuda.get_device_properties(spec.device).total_memory
        if excess := excess_bytes(config, load_recipe(spec.recipe), room):
            needs = f"a step needs {(room + excess) / 2**30:.0f} GB, {excess / 2**30:.0f} GB more than the card has"
            return ArmTimes(failed=f"does not fit: {needs}; try {smaller(spec)}")
    engine = NativeEngine(config, load_recipe(spec.recipe), Ranks(device=spec.device), optimizer=spec.optimizer)
    torch.manual_seed(1)
    for parameter in engine.model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=preset.cpt.init_std)
    meter = Meter(spec.device)  # before the steps: finding the card would let it rest
    ledger.start()
    engine.train_step([next(batches)], preset.cpt.lr).result()
    first_step_s = since_start(waited)
    ran: dict[str, set[str]] = {}
    for gemm, operands, implementation in ledger.stop():
        ran.setdefault(f"{gemm} {operands}", set()).add(implementation)
    by = {label: ", ".join(sorted(implementations)) for label, implementations in ran.items()}
    by["attention"] = implementation_of(torch.empty(0, 1, shape.head_dim, dtype=engine.model.dtype, device=spec.device))
    for _ in range(spec.after + spec.warmup - 1):
        engine.train_step([next(batches)], preset.cpt.lr)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    parameters = sum(p.numel() for p in engine.model.parameters())
    made = ArmTimes(by=by, parameters=parameters, first_step_s=first_step_s)
    clock, pending = Clock(cuda), []
    with meter:
        for _ in range(spec.steps):
            batch = next(batches)
            clock.mark()
            pending.append(engine.train_step([batch], preset.cpt.lr, clock.mark))
        made.ms = by_phase(clock.intervals())
    made.load = meter.load()
    made.losses = [step.result().loss for step in pending]
    made.versions = {"torch": torch.__version__}
    if cuda:
        made.peak_gb = torch.cuda.max_memory_allocated() / 2**30
        made.reserved_gb = torch.cuda.max_memory_reserved() / 2**30
        if spec.profile:
            from .profile import profile

            made.profile = profile(lambda: engine.train_step([batch], preset.cpt.lr)).told()
    return made


def smaller(spec: ArmSpec) -> str:
    """What makes an arm smaller that does not fit, of what it does not do yet."""
    ways = ["fewer --rows"] if spec.rows > 1 else []
    ways += ["--recompute full"] if spec.recompute != "full" else []
    ways += ["recipe infir2-lean"] if spec.optimizer and not spec.recipe.endswith("lean") else []
    return ", ".join([*ways, "a shorter --seq-len"]) + " or fewer --layers"


def guarded(spec: ArmSpec, run: Callable[[], ArmTimes]) -> ArmTimes:
    """`run`, with a card that is too small turned into a reason."""
    import torch

    try:
        return run()
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". GPU")[0].removeprefix("CUDA out of memory. ")
        return ArmTimes(failed=f"does not fit: out of memory. {reason}; try {smaller(spec)}")


def show(times: ArmTimes) -> None:
    """Prints the result as the last line of standard output."""
    print(json.dumps(dataclasses.asdict(times)), flush=True)


def main() -> None:
    """Entry point of the process."""
    from .child import wait

    spec = ArmSpec(**json.loads(sys.argv[1]))
    waited = wait(_import)
    show(guarded(spec, lambda: measure(spec, waited)))


def _import() -> None:
    """Everything that takes long to import, none of which touches the card."""
    for name in ("..engines.native", "..ops.hopper.attention"):
        with suppress(Exception):  # missing or broken libraries are told where they are used
            importlib.import_module(name, __package__)


if __name__ == "__main__":
    main()
