"""Model cards: what the weights are, how they were trained and what was measured, and by which tool.

Facts come from the run folder; licence and base model are inherited from the origin's card where there is one. Paths of
the machine that trained do not enter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.schema import RunConfig
from ..errors import InputError
from ..hub import hub_name
from ..train.metrics import read_metrics
from .cast import REPORT
from .folder import read_config, weight_shape

CARD, FP8_HEADING = "README.md", "## FP8 cast"


@dataclass(frozen=True)
class Facts:
    """What a card says beyond the weights. `step` None: unknown. `training`: settings of a run that is not ours."""

    name: str
    parameters: int
    dtype: str
    run: RunConfig | None = None
    recipe: str = ""
    step: int | None = None
    losses: dict[str, float] = field(default_factory=dict)
    origin: Path | None = None
    base_model: str = ""
    training: tuple[tuple[str, str], ...] = ()


def measured(run_folder: Path, step: int | None) -> dict[str, float]:
    """The losses logged up to a step: `train` (the last step's) and `held-out` (the last evaluation's)."""
    found = {}
    for record in read_metrics(run_folder):
        if step is not None and record["step"] > step:
            break
        if isinstance(record.get("loss"), float):
            found["train" if record["kind"] == "step" else "held-out"] = record["loss"]
    return found


def inherited(origin: Path | None) -> dict[str, Any]:
    """Front matter of the origin's card that an export inherits: licence, languages, tags, base model, pipeline."""
    if origin is None or not (origin / CARD).is_file():
        return {}
    try:
        return _read_card(origin / CARD)[0]
    except InputError:
        return {}  # a damaged card is no reason to refuse the weights beside it


def _read_card(path: Path) -> tuple[dict[str, Any], str]:
    """What a card's front matter says that others inherit, and its text.

    Raises:
        InputError: the card is no text, or its front matter cannot be read.
    """
    from huggingface_hub import ModelCard

    try:
        card = ModelCard.load(path, ignore_metadata_errors=True)
        data = card.data.to_dict()
    except Exception as error:  # the library lets through whatever its YAML reader and its own types raise
        what = f"the card cannot be read: {str(error).split(chr(10))[0]}"
        raise InputError(what, str(path), "mend what stands between its first two lines ---, or remove it") from error
    wanted = ("license", "license_name", "license_link", "language", "pipeline_tag", "base_model")
    front = {key: data[key] for key in wanted if data.get(key)}
    if tags := [tag for tag in data.get("tags") or [] if isinstance(tag, str)]:
        front["tags"] = tags
    return front, card.text


def folder_card(folder: Path, base_model: str = "", licence: str = "") -> str:
    """The card of a finished folder: its own text, with licence, base model and what an FP8 cast measured put in.

    Args:
        base_model: hub id of the model that this one was made from; empty: the one that was cast, where the report of
            the cast knows it, else what the folder's card says.
        licence: hub name of a licence; empty: what the folder's card says.

    Raises:
        InputError: the folder has no config.json, or its card or cast report is damaged.
    """
    from huggingface_hub import ModelCardData

    report = _cast_report(folder)
    weight_shape(read_config(folder), str(folder / "config.json"))
    front, text = _read_card(folder / CARD) if (folder / CARD).is_file() else ({}, "")
    text = text.split(FP8_HEADING)[0].strip() or f"# {hub_name(folder) or folder.resolve().name}"
    if base := base_model or report.get("source_id"):  # the card beside it is the source's own and names its base
        front["base_model"] = base
    if licence:
        front["license"] = licence
    front["tags"] = sorted({"infir2", *front.get("tags", []), *(["fp8"] if report else [])})
    front |= {"library_name": "transformers"}
    if report and front.get("base_model"):
        front["base_model_relation"] = "quantized"
    lines = ["---", ModelCardData(**front).to_yaml(), "---", "", text]
    if report:
        lines += ["", FP8_HEADING, "", *_table(_fp8_rows(report))]
    return "\n".join(lines) + "\n"


def _cast_report(folder: Path) -> dict[str, Any]:
    file = folder / REPORT
    if not file.is_file():
        return {}
    try:
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _fp8_rows(report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"the report of the cast cannot be read: {error}", str(file), "cast the model again"
        ) from error
    return report


def _fp8_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    scales = "powers of two" if report["scale"] == "pow2" else "float32"
    height, width = report["quantization_config"]["weight_block_size"]
    return [
        ("weights", f"E4M3 in {height}x{width} blocks, scales {scales} ({report['why']})"),
        ("relative error of the weights", f"{report['total']['relative_error']:.5f}"),
        ("weights that became zero", f"{report['total']['underflow']:.3%}"),
        ("left as they were", f"{len(report['kept'])} linear layers, embedding, norms and biases"),
        ("cast by", report["tool"]),
    ]


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
    if facts.training:
        lines += ["", "## Training", "", *_table(list(facts.training))]
    if facts.run is not None:
        lines += ["", "## Training", "", *_table(_training(facts.run))]
        shares = [
            (Path(b.prefix).name, f"weight {b.weight:g}, content {b.content or 'not recorded'}") for b in facts.run.data
        ]
        lines += ["", "## Data", "", *_table(shares)]
    return "\n".join(lines) + "\n"


def _training(run: RunConfig) -> list[tuple[str, str]]:
    train = run.train
    phase = {"full": "", "decay": ", decay phase"}.get(run.phase, f", stage {run.phase}")
    rows = [("stage", f"{run.stage}{phase}")]
    if run.cpt:
        tokens = f"{run.cpt.global_batch * run.cpt.seq_len:,} ({run.cpt.global_batch} sequences of {run.cpt.seq_len:,})"
        rows += [("steps planned", f"{train.steps:,}"), ("tokens a step", tokens)]
    if run.sft and run.chat:
        rows += [
            (
                "epochs",
                f"{run.sft.epochs} of {run.chat.samples:,} samples, {train.steps:,} steps of {train.global_batch}",
            ),
            ("tokens an epoch", f"{run.chat.tokens:,}, {run.chat.trained_tokens:,} of them trained on"),
        ]
    return rows + [
        ("schedule", f"{train.schedule}: warm-up {train.warmup_steps:,}, decay {train.decay_steps:,} steps"),
        ("learning rate", f"{train.lr:g} to {train.min_lr:g}"),
        ("AdamW", f"betas {train.beta1:g}, {train.beta2:g}; weight decay {train.weight_decay:g}; clip {train.clip:g}"),
        ("seed", str(train.seed)),
        ("tokenizer", Path(run.tokenizer).name or "not recorded"),
    ]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]
