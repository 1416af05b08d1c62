"""What stands beside an export of Megatron's checkpoint: origin, recipe and card, as its arguments say."""

from __future__ import annotations

from pathlib import Path

from ...hub import hub_name
from ...precision.recipe import Recipe, load_recipe
from ..card import CARD, Facts, card_text
from ..export import Beside
from ..native_in import Surroundings
from .project import CARRIED
from .weights import MegatronWeights

SETTINGS = ("lr_decay_style", "lr_wsd_decay_style", *CARRIED, "fp8", "fp8_recipe")


def recipe_of(arguments: dict[str, object]) -> Recipe | None:
    """Our recipe for what Megatron's FP8 arguments select; None when it has no name here.

    Float32 scales are chosen by an environment variable that a checkpoint does not keep, so `blockwise` is taken for
    TransformerEngine's default, powers of two.
    """
    if not arguments.get("fp8"):
        return load_recipe("bf16") if arguments.get("bf16") else None
    if arguments.get("fp8_recipe") == "blockwise" and arguments.get("fp8") == "e4m3":
        return load_recipe("infir2")
    return None


def surroundings(weights: MegatronWeights, origin: Path | None, dtype: str) -> Surroundings:
    """Origin, recipe and card of an export, and what to tell the user."""
    notes, arguments = list(weights.notes), weights.checkpoint.arguments
    recipe = recipe_of(arguments)
    texts = {"recipe.json": recipe.to_json() + "\n"} if recipe else {}
    if recipe and recipe.uses_fp8:
        notes.append(f"recipe {recipe.name}, from --fp8-recipe; with float32 scales: cast-fp8 --no-pow2-scale")
    if origin is None:
        notes.append("no tokenizer is written: add one with --origin HF_DIR")
    if seen := weights.checkpoint.placeholders:
        kinds = ", ".join(f"{name} ({count})" for name, count in sorted(seen.items()))
        notes.append(f"common state kept as inert placeholders: {kinds}")
    facts = Facts(
        name=weights.path.parent.resolve().name,
        parameters=weights.shape.parameters,
        dtype=dtype,
        recipe=recipe.name if recipe else "",
        step=weights.iteration,
        origin=origin,
        base_model=hub_name(origin) if origin else "",
        training=_training(arguments),
    )
    return Surroundings(Beside(origin, texts | {CARD: card_text(facts)}), notes)


def _training(arguments: dict[str, object]) -> tuple[tuple[str, str], ...]:
    """The settings of Megatron's run that a card tells; of paths only the last part."""
    rows = [(name.replace("_", " "), str(arguments[name])) for name in SETTINGS if arguments.get(name) is not None]
    data = arguments.get("data_path")
    words = data if isinstance(data, list) else [data] if data else []
    if words:
        rows.append(("data", ", ".join(Path(str(word)).name for word in words)))
    return tuple(rows)
