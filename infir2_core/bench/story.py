"""What a comparison is told with: card, published figures, where the time goes and which floor stands below it."""

from __future__ import annotations

import dataclasses
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InputError, MachineError, nearest
from .arm import ArmSpec
from .clocks import Load
from .compare import PEER_NAME, Row, not_comparable, published

RECOMPUTE = ("none", "selective", "full")
BY_REFERENCE = ("tiny", "small")  # sizes whose step takes seconds at most without kernels
Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class Card:
    """The machine of a comparison.

    Attributes:
        name: of the GPU, or of the processor.
        gpu: whether the arms run on it.
        versions: torch, CUDA, driver, infir2 and, in a checkout, its commit.
    """

    name: str
    gpu: bool
    versions: dict[str, str]


@dataclass
class Told:
    """A title, remarks, named tables and the same as data."""

    title: str
    notes: list[str] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


def card(reference: bool, size: str) -> Card:
    """This machine, judged for the comparison.

    Raises:
        MachineError: no GPU with FP8 units, and not asked to run by reference.
        InputError: asked to run a size by reference that would take minutes a step.
    """
    import torch

    from ..machine import driver

    versions = {"infir2": __version__, "torch": torch.__version__} | _commit()
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        versions |= {"cuda": str(torch.version.cuda), "driver": driver() or "unknown"}
        return Card(torch.cuda.get_device_name(), True, versions)
    if not reference:
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        raise MachineError(
            f"FP8 needs a GPU with FP8 units (compute capability 8.9 or more), found {found}",
            "infir2 bench",
            "infir2 bench bf16-vs-fp8 --size tiny --seq-len 256 --reference  (times the reference arithmetic)",
        )
    if size not in BY_REFERENCE:
        raise InputError(
            f"by reference only {' and '.join(BY_REFERENCE)} are quick enough", f"--size {size}", "--size tiny"
        )
    import platform

    return Card(f"{platform.machine()} CPU, {torch.get_num_threads()} threads", False, versions)


def checked(recompute: str, peer: str | None, both: bool) -> None:
    """Raises InputError for a value that these options do not have, and for --check and --accept in one command."""
    if both:
        raise InputError("--accept would store the ratio that --check complains of", "--check --accept", "one of them")
    if recompute not in RECOMPUTE:
        raise InputError(f"no such recomputation: {recompute}", "--recompute", nearest(recompute, RECOMPUTE))
    if peer not in (None, PEER_NAME):
        raise InputError(f"no such peer: {peer}", "--peer", f"--peer {PEER_NAME}")
    if peer and recompute == "selective":
        raise InputError("the peer recomputes whole layers or nothing", "--recompute selective", "--recompute full")


def tell(found: Card, spec: ArmSpec, rows: list[Row]) -> Told:
    """Everything that is shown around the rows."""
    layers = f", {spec.layers} layers" if spec.layers else ""
    told = Told(f"{spec.size}{layers}, {spec.seq_len} x {spec.rows} tokens a step, {found.name}")
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    peers = {f"{k} {v}" for row in rows for k, v in row.versions.items() if k not in found.versions}
    told.notes.append("versions: " + ", ".join([versions, *sorted(peers)]))
    for row in rows:
        gemms = sorted({by for what, each in row.by.items() if what != "attention" for by in each.split(", ")})
        if gemms:
            told.notes.append(f"{row.name}: GEMMs by {', '.join(gemms)}; attention by {row.by.get('attention', '-')}")
    starts = [f"{row.name} {row.first_step_s:.0f} s" for row in rows if row.first_step_s]
    told.notes.append(f"from the start of a process to the end of its first step: {', '.join(starts) or 'unknown'}")
    _published(told, found, spec)
    if found.gpu:
        _breakdown(told, rows)
        _clocks(told, rows, _floor(told, spec, rows))
    return told


def _published(told: Told, found: Card, spec: ArmSpec) -> None:
    row = published(spec.size, spec.seq_len)
    if row is None:
        return
    cells = []
    for name in ("bf16", "fp8"):
        total = row[name]["forward_ms"] + row[name]["backward_ms"]
        ratio = total / (row["bf16"]["forward_ms"] + row["bf16"]["backward_ms"])
        figures = [row[name]["forward_ms"], row[name]["backward_ms"], total]
        rest = [row[name]["peak_gb"], row[name]["tflops"], row["tp"], row["micro_batch"], row["card"]]
        cells.append([f"InfiR2 {name}", *map(str, figures), f"{ratio:.2f}", *map(str, rest)])
    head = ["published", "forward", "backward", "fwd + bwd", "ratio", "peak GB", "TFLOPS", "TP", "MBS", "card"]
    reasons = not_comparable(row, spec.rows, spec.layers, found.name)
    told.tables[f"Published, not comparable: {'; '.join(reasons)}"] = (head, cells)
    told.data["published"] = row | {"not_comparable": reasons}


def _breakdown(told: Told, rows: list[Row]) -> None:
    shown = [row for row in rows if row.profile]
    groups = list(dict.fromkeys(group for row in shown for group in row.profile))
    cells = [[group, *(f"{row.profile.get(group, 0.0):.1f}" for row in shown)] for group in groups]
    if shown:
        told.tables["GPU milliseconds of one step, by group of kernels"] = (
            ["group", *(row.name for row in shown)],
            cells,
        )


def _floor(told: Told, spec: ArmSpec, rows: list[Row]) -> dict[str, Load]:
    """Adds the distance to the floor; clock and power while its GEMMs ran alone."""
    from ..config.presets import load_preset
    from .ceilings import measure

    shape = load_preset(spec.size).model
    shape = shape.model_copy(update={"layers": spec.layers or shape.layers})
    ceilings = measure(shape, spec.seq_len, spec.rows)
    cells = []
    for row in rows:
        floor = ceilings.floor_ms["bf16" if row.name.endswith("bf16") else "fp8"]
        if not row.failed:
            total = row.ms["forward+backward"]
            cells.append([row.name, f"{floor:.0f}", f"{total:.0f}", f"{total / floor:.2f}"])
    head = ["arm", "floor: GEMMs, attention, head", "forward + backward", "ratio"]
    told.tables["Distance to this card's ceilings (infir2 bench gemm)"] = (head, cells)
    told.data["floor_ms"] = ceilings.floor_ms
    return ceilings.gemm_load


def _clocks(told: Told, rows: list[Row], gemms: dict[str, Load]) -> None:
    """How the card ran in the timed steps, and while the same GEMMs ran alone; nothing where it cannot be read."""
    found = {row.name: row.load for row in rows} | {f"{name} GEMMs alone": load for name, load in gemms.items()}
    found = {name: load for name, load in found.items() if load != Load()}
    if found:
        cells = [[name, *load.cells()] for name, load in found.items()]
        head = ["while these ran", "SM clock", "power", "clock held down by, share of readings"]
        told.tables["Clock and power, medians"] = (head, cells)
    told.data["gemm_load"] = {name: dataclasses.asdict(load) for name, load in gemms.items()}


def _commit() -> dict[str, str]:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": done.stdout.strip()}
