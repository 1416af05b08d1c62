"""What stands beside an export of a native checkpoint: origin, tokenizer, recipe and card, as its run folder says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.schema import RunConfig
from ..config.source import open_native
from ..config.toml import read_text
from ..data.byte_files import byte_files
from ..data.tokenizer import BYTE
from ..errors import InputError
from ..hub import hub_name
from ..precision.recipe import Recipe, list_recipes, load_recipe
from .card import CARD, Facts, card_text, measured
from .cast_plan import read_recipe
from .export import Beside
from .weights import NativeWeights

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "added_tokens.json",
)
GENERATION = "generation_config.json"


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
    notes, folder, began = [], origin, _beginning(run)
    if folder is None and began is not None and (began / "config.json").is_file():
        folder = began
        notes.append(f"config, tokenizer and licence come from {folder}, which the run started from")
    recipe = (read_recipe(home) if run else None) or _by_hash(weights)
    texts = {"recipe.json": recipe.to_json() + "\n"} if recipe else {}
    config: dict[str, Any] = {}
    without: tuple[str, ...] = ()
    if run and run.chat:
        found = _chat_files(run.tokenizer, run.chat.turn_end, folder)
        texts, config, without = texts | found, {"eos_token_id": run.chat.turn_end}, TOKENIZER_FILES if found else ()
        if _tokenizer(run.tokenizer):
            notes.append(f"tokenizer and chat template are those of the training, {run.tokenizer}")
        else:
            instead = f"that of {folder} is written" if found else "none is written; add one with --origin HF_DIR"
            notes.append(f"the tokenizer of the training is gone, {run.tokenizer}: {instead}")
    elif folder is None or not (folder / "tokenizer.json").is_file():
        found = _tokenizer(run.tokenizer if run else "")
        texts |= found
        if not found:
            notes.append("no tokenizer is written: add one with --origin HF_DIR")
    step = int(weights.content["step"])
    base = hub_name(began) if began else ""
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
    return Surroundings(Beside(folder, texts | {CARD: card_text(facts)}, config, without), notes)


def _beginning(run: RunConfig | None) -> Path | None:
    """The Hugging Face folder that a run, or the runs before it, started from."""
    for _ in range(16):  # stages; more would be a circle
        if run is None or run.source.kind == "scratch":
            return None
        if run.source.kind == "hf":
            return Path(run.source.path)
        try:
            run = open_native(Path(run.source.path), "source").run
        except InputError:
            return None  # the checkpoint is gone
    return None


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
    return {name: read_text(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}


def _chat_files(reference: str, turn_end: int, origin: Path | None) -> dict[str, str]:
    """Tokenizer, chat template and generation config of a fine-tuned model, in which the end of a turn is the eos.

    Args:
        reference: tokenizer of the run.
        turn_end: id of the token that ends an assistant's turn.
        origin: folder whose tokenizer and generation config serve where the run's are not there.
    """
    files = _tokenizer(reference) or (_tokenizer(str(origin)) if origin else {})
    if not files:
        return {}
    folder = None if reference == BYTE else Path(reference).expanduser()
    for place in (folder, origin):
        if GENERATION not in files and place is not None and (place / GENERATION).is_file():
            files[GENERATION] = read_text(place / GENERATION)
    name = next(
        (t["content"] for t in json.loads(files["tokenizer.json"])["added_tokens"] if t["id"] == turn_end), None
    )
    files.setdefault("tokenizer_config.json", "{}")
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if name is not None and file in files:
            files[file] = _json_text(json.loads(files[file]) | {"eos_token": name})
    generation = json.loads(files.get(GENERATION, "{}"))
    earlier = generation.get("eos_token_id")
    ends = [turn_end, *(i for i in (earlier if isinstance(earlier, list) else [earlier]) if i not in (None, turn_end))]
    files[GENERATION] = _json_text(generation | {"eos_token_id": ends[0] if len(ends) == 1 else ends})
    return files


def _json_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
