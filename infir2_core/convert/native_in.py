"""What stands beside an export of a native checkpoint: origin, tokenizer, recipe and card, as its run folder says."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..config.source import open_native
from ..data.byte_files import byte_files
from ..data.tokenizer import BYTE
from ..precision.recipe import Recipe, list_recipes, load_recipe
from .card import CARD, Facts, card_text, hub_name, measured
from .cast_plan import read_recipe
from .export import Beside
from .weights import NativeWeights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class Surroundings:
    """`beside` for the export, and what to tell the user about where it came from."""

    beside: Beside
    notes: list[str] = field(default_factory=list)


def surroundings(weights: NativeWeights, origin: Path | None, dtype: str) -> Surroundings:
    """Finds what belongs to a checkpoint.

    Args:
        origin: Hugging Face folder that gives config, tokenizer and licence; None: the folder that the run started
            from, when it is still there.

    Raises:
        InputError: the run's recipe is damaged.
    """
    run = open_native(weights.path, "RUN_OR_CHECKPOINT").run
    home = weights.path.parent.parent
    notes, folder = [], origin
    if folder is None and run and run.source.kind == "hf" and (Path(run.source.path) / "config.json").is_file():
        folder = Path(run.source.path)
        notes.append(f"config, tokenizer and licence come from {folder}, which the run started from")
    recipe = (read_recipe(home) if run else None) or _by_hash(weights)
    texts = {"recipe.json": recipe.to_json() + "\n"} if recipe else {}
    if folder is None or not (folder / "tokenizer.json").is_file():
        found = _tokenizer(run.tokenizer if run else "")
        texts |= found
        if not found:
            notes.append("no tokenizer is written: add one with --origin HF_DIR")
    step = int(weights.content["step"])
    base = hub_name(Path(run.source.path)) if run and run.source.kind == "hf" else ""
    facts = Facts(
        name=run.name if run else weights.path.name,
        parameters=weights.shape.parameters,
        dtype=dtype,
        run=run,
        recipe=recipe.name if recipe else "",
        step=step,
        losses=measured(home, step) if run else {},
        origin=folder,
        base_model=base,
    )
    return Surroundings(Beside(folder, texts | {CARD: card_text(facts)}), notes)


def _by_hash(weights: NativeWeights) -> Recipe | None:
    """The shipped recipe that a checkpoint without its run was made with."""
    wanted = weights.content["state"].get("engine", {}).get("recipe")
    return next((recipe for recipe in map(load_recipe, list_recipes()) if recipe.hash == wanted), None)


def _tokenizer(reference: str) -> dict[str, str]:
    """Tokenizer files by name, for a run that recorded which tokenizer made its data."""
    if reference == BYTE:
        return byte_files()
    folder = Path(reference).expanduser() if reference else None
    if folder is None or not (folder / "tokenizer.json").is_file():
        return {}
    extra = (*TOKENIZER_FILES, "chat_template.jinja", "added_tokens.json")
    return {name: (folder / name).read_text(encoding="utf-8") for name in extra if (folder / name).is_file()}
