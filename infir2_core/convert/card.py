"""The model card of an export: what the weights are, how they were trained and what was measured, and by which tool.

Facts come from the run folder; licence and base model are inherited from the origin's card where there is one. Paths of
the machine that trained do not enter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.schema import RunConfig
from ..train.metrics import read_metrics

CARD = "README.md"


@dataclass(frozen=True)
class Facts:
    """What a card says beyond the weights. `step` None: not from a run of ours."""

    name: str
    parameters: int
    dtype: str
    run: RunConfig | None = None
    recipe: str = ""
    step: int | None = None
    losses: dict[str, float] = field(default_factory=dict)
    origin: Path | None = None
    base_model: str = ""


def measured(run_folder: Path, step: int | None) -> dict[str, float]:
    """The losses logged up to a step: `train` (the last step's) and `held-out` (the last evaluation's)."""
    found = {}
    for record in read_metrics(run_folder):
        if step is not None and record["step"] > step:
            break
        if isinstance(record.get("loss"), float):
            found["train" if record["kind"] == "step" else "held-out"] = record["loss"]
    return found


def hub_name(folder: Path) -> str:
    """The hub id of a folder of the hub's cache (models--OWNER--NAME/snapshots/REVISION); empty for other folders."""
    match = re.search(r"models--([^/]+)--([^/]+)/snapshots/", f"{folder.resolve()}/")
    return f"{match[1]}/{match[2]}" if match else ""


def inherited(origin: Path | None) -> dict[str, Any]:
    """Front matter of the origin's card that an export inherits: licence, languages, tags, base model, pipeline."""
    if origin is None or not (origin / CARD).is_file():
        return {}
    from huggingface_hub import ModelCard

    try:
        data = ModelCard.load(origin / CARD, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, OSError):
        return {}  # a damaged card is no reason to refuse the weights beside it
    wanted = ("license", "license_name", "license_link", "language", "pipeline_tag", "base_model", "tags")
    return {key: data[key] for key in wanted if data.get(key)}


def card_text(facts: Facts) -> str:
    """The whole card, front matter included."""
    from huggingface_hub import ModelCardData

    front = inherited(facts.origin)
    base = facts.base_model or (hub_name(facts.origin) if facts.origin else "")
    if base:
        front["base_model"] = base
    front["tags"] = sorted({"infir2", *([facts.recipe] if facts.recipe else []), *front.get("tags", [])})
    front |= {"library_name": "transformers"}
    front.setdefault("pipeline_tag", "text-generation")
    rows = [("parameters", f"{facts.parameters:,}"), ("dtype", facts.dtype), ("written by", f"infir2 {__version__}")]
    if base:
        rows.append(("started from", base))
    if facts.recipe:
        rows.append(("precision recipe", facts.recipe))
    if facts.step is not None:
        rows.append(("step", f"{facts.step:,}"))
    rows += [(f"{kind} loss (nats a token)", f"{loss:.4f}") for kind, loss in facts.losses.items()]
    lines = ["---", ModelCardData(**front).to_yaml(), "---", "", f"# {facts.name}", ""]
    lines += _table(rows)
    if facts.run is not None:
        lines += ["", "## Training", "", *_table(_training(facts.run))]
        shares = [
            (Path(b.prefix).name, f"weight {b.weight:g}, content {b.content or 'not recorded'}") for b in facts.run.data
        ]
        lines += ["", "## Data", "", *_table(shares)]
    return "\n".join(lines) + "\n"


def _training(run: RunConfig) -> list[tuple[str, str]]:
    cpt = run.cpt
    return [
        ("stage", run.stage if run.phase == "full" else f"{run.stage}, {run.phase} phase"),
        ("steps planned", f"{cpt.steps:,}"),
        ("tokens a step", f"{cpt.global_batch * cpt.seq_len:,} ({cpt.global_batch} sequences of {cpt.seq_len:,})"),
        ("schedule", f"{cpt.schedule}: warm-up {cpt.warmup_steps:,}, decay {cpt.decay_steps:,} steps"),
        ("learning rate", f"{cpt.lr:g} to {cpt.min_lr:g}"),
        ("AdamW", f"betas {cpt.beta1:g}, {cpt.beta2:g}; weight decay {cpt.weight_decay:g}; clip {cpt.clip:g}"),
        ("seed", str(cpt.seed)),
        ("tokenizer", Path(run.tokenizer).name or "not recorded"),
    ]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]
