"""Accepted ratios per card, and whether a new comparison has become slower than its own noise explains.

Only ratios within one run are kept: absolute times differ from card to card and day to day.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ..errors import InputError, MachineError
from .arm import ArmSpec
from .compare import PEER_NAME, Row

MEMORY = "peak_gb"
_Accepted = TypeAdapter(dict[str, dict[str, dict[str, float]]])
LEAST = 0.02  # changes below this are never called a regression


@dataclass(frozen=True)
class Regression:
    """A ratio that has grown: the arm, the phase or `peak_gb`, what was accepted, what was found (None: the arm failed)
    and how much is allowed.
    """

    arm: str
    what: str
    accepted: float
    found: float | None
    allowed: float

    def told(self) -> str:
        """The regression as a sentence."""
        found = "has no result" if self.found is None else f"takes {self.found:.3f} of BF16's {self.what}"
        return f"{self.arm} {found}, accepted {self.accepted:.3f}, allowed {self.allowed:.3f}"


def path_for(folder: Path, card: str) -> Path:
    """FOLDER/nvidia-h200.json for "NVIDIA H200"."""
    return folder / ("-".join(card.lower().split()) + ".json")


def key_of(spec: ArmSpec) -> str:
    """Name of one comparison, for example `1.5b-8192x2`."""
    parts = [f"{spec.size}-{spec.seq_len}x{spec.rows}"]
    parts += [f"{spec.layers}layers"] if spec.layers else []
    parts += [] if spec.optimizer else ["fwdbwd"]
    parts += [f"after{spec.after}"] if spec.after else []
    parts += [] if spec.recompute == "none" else [f"recompute-{spec.recompute}"]
    return "-".join(parts)


def noise(rows: list[Row], arm: str, phase: str) -> float:
    """Relative uncertainty of the ratio of two medians: half the range over the root of the steps, of both.

    Half a range is about a standard deviation of four values and more than one of ten.
    """
    ours, base = next(row for row in rows if row.name == arm), rows[0]
    parts = (
        (row.spread[phase][1] - row.spread[phase][0]) / 2 / row.ms[phase] / math.sqrt(row.steps) for row in (ours, base)
    )
    return sum(parts)


def accept(path: Path, key: str, rows: list[Row]) -> None:
    """Stores the ratios of a comparison as the accepted ones; arms that it did not have keep theirs.

    Raises:
        InputError: the file cannot be read or written.
        MachineError: our BF16 has no result.
    """
    stored = read(path) if path.exists() else {}
    _base(rows)
    stored[key] = stored.get(key, {}) | {
        row.name: {name: row.ratio[name] for name in ("forward+backward", "step", MEMORY) if name in row.ratio}
        for row in rows[1:]
        if not row.failed
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the baseline cannot be written: {error.strerror}", str(path), "--baselines FOLDER"
        ) from error


def read(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """What was accepted: comparison -> arm -> phase or `peak_gb` -> ratio.

    Raises:
        InputError: no such file, or it is damaged.
    """
    try:
        return _Accepted.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise InputError("no baseline was accepted for this card", str(path), "run once with --accept") from None
    except (OSError, ValueError) as error:
        reason = "it does not map comparisons to arms to ratios" if isinstance(error, ValueError) else error.strerror
        raise InputError(f"the baseline cannot be read: {reason}", str(path), "remove it, and --accept anew") from error


def _base(rows: list[Row]) -> None:
    if rows[0].failed:
        raise MachineError(f"there is no ratio to BF16: {rows[0].failed}", rows[0].name)


def regressions(path: Path, key: str, rows: list[Row], phase: str) -> list[Regression]:
    """Arms of ours whose time or memory over that of our BF16 has grown by more than noise.

    Raises:
        InputError: nothing was accepted for this comparison.
        MachineError: our BF16 has no result.
    """
    stored = read(path)
    if key not in stored:
        raise InputError(f"no baseline was accepted for {key}", str(path), "run once with --accept")
    _base(rows)
    found = []
    for row in rows[1:]:
        accepted = {} if row.name.startswith(PEER_NAME) else stored[key].get(row.name, {})
        if accepted and row.failed:  # what ran once and runs no more is worse than any ratio
            found.append(Regression(row.name, phase, accepted[phase], None, accepted[phase]))
        for what in (phase, MEMORY) if not row.failed else ():
            if what in accepted and what in row.ratio:
                allowed = accepted[what] * (1 + (LEAST if what == MEMORY else max(LEAST, noise(rows, row.name, what))))
                if row.ratio[what] > allowed:
                    found.append(Regression(row.name, what, accepted[what], row.ratio[what], allowed))
    return found
