"""A model that is ready to compute, from any folder of weights: what generation needs to know, then the decoder.

In two steps, so that a missing tokenizer is known before gigabytes are read. A run that is training retires
checkpoints, also the one that is being read: then its newest one is read instead. The decoder is built for forwards
alone: in a bf16 recipe it keeps the bf16 weights that training computed with and no masters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config.source import CHECKPOINTS, CONFIG, MANIFEST, open_native
from ..data.tokenizer import BYTE, Tokenizer
from ..errors import InputError
from ..model.decoder import Decoder
from ..precision.recipe import Optimizer, Recipe, load_recipe
from ..train.checkpoint import CheckpointStore
from .cast_plan import read_recipe
from .weights import HFWeights, NativeWeights, Weights, open_weights, rows_as, spans

AGAIN = 2  # times that reading begins anew when the checkpoint has gone


@dataclass(frozen=True)
class Found:
    """A model that was found.

    Attributes:
        folder: what was asked for: a Hugging Face folder, a run or a checkpoint.
        weights: opened and, for a checkpoint of ours, verified.
        recipe: what it was trained with, as its folder or run says; None: that is not known.
        tokenizer: reference for `load_tokenizer`; empty: not known.
        ends: ids that config.json and generation_config.json call eos, or that end a turn in a run of fine-tuning.
        chat: whether prompts are a user's turn; None: where the tokenizer has a chat template.
    """

    folder: Path
    weights: Weights
    recipe: Recipe | None
    tokenizer: str
    ends: frozenset[int]
    chat: bool | None = None


def find_model(folder: Path, where: str) -> Found:
    """Opens a Hugging Face folder, run or checkpoint.

    Raises:
        InputError: as `open_weights`; a quantised model; a variant that the decoder does not compute.
    """
    for _ in range(AGAIN):
        before = _checkpoints(folder)
        try:
            return _find(folder, where)
        except (InputError, OSError):
            if before <= _checkpoints(folder):
                raise
    return _find(folder, where)


def _checkpoints(folder: Path) -> set[Path]:
    """Those of a run; empty for what is no run."""
    return set((folder / CHECKPOINTS).glob("step-*"))


def _find(folder: Path, where: str) -> Found:
    if (folder / "config.json").is_file() and not (folder / MANIFEST).is_file():
        weights = HFWeights(folder, trained=True)
        tokenizer = str(folder) if (folder / "tokenizer.json").is_file() else ""
        return Found(folder, weights, read_recipe(folder), tokenizer, _ends(folder))
    opened = open_weights(folder, where)
    if not isinstance(opened, NativeWeights):
        return Found(folder, opened, None, "", frozenset())
    run = open_native(opened.path, where).run
    home = opened.path.parent.parent
    inside = opened.path.parent.name == CHECKPOINTS and (home / CONFIG).is_file()
    tokenizer, ends = run.tokenizer if run else "", frozenset[int]()
    if run and run.chat:
        ends = frozenset({run.chat.turn_end})
    if run and run.source.kind == "hf":
        origin = Path(run.source.path)
        ends |= _ends(origin)
        tokenizer = tokenizer or (str(origin) if (origin / "tokenizer.json").is_file() else "")
    chat = run.chat is not None if run and tokenizer == BYTE else None
    return Found(folder, opened, read_recipe(home) if inside else None, tokenizer, ends, chat)


def choose_recipe(found: Found, wanted: str | None) -> Recipe:
    """The recipe to compute with: what is wanted, else that of the training, else bf16.

    Raises:
        InputError: there is no such recipe, or pieces of it are not implemented.
    """
    recipe = load_recipe(wanted) if wanted else found.recipe or load_recipe("bf16")
    if missing := recipe.missing():
        what = f"recipe {recipe.name} needs what is not implemented: {', '.join(missing)}"
        raise InputError(what, "--recipe", "--recipe bf16, or another of infir2 recipes list")
    return recipe


@torch.no_grad()
def load_model(
    found: Found, recipe: Recipe, device: str, progress: Callable[[int, int], None]
) -> tuple[Decoder, Found]:
    """The decoder with its weights, without gradients, and where they are from: `found`, unless its run retired that
    checkpoint meanwhile.

    Args:
        progress: gets bytes read and bytes in all.

    Raises:
        InputError: weights with NaN, or a recipe that needs amax histories which these weights do not carry.
    """
    for _ in range(AGAIN):
        try:
            return _load(found, recipe, device, progress), found
        except (InputError, OSError):
            if found.weights.path.exists() or found.weights.path == found.folder:
                raise
        found.weights.close()
        found = find_model(found.folder, str(found.folder))
    return _load(found, recipe, device, progress), found


def _load(found: Found, recipe: Recipe, device: str, progress: Callable[[int, int], None]) -> Decoder:
    weights = found.weights
    lean = Optimizer(master="split") if recipe.compute == "bf16" else Optimizer()
    model = Decoder(weights.shape, recipe.model_copy(update={"optimizer": lean}), device).requires_grad_(False)
    _load_histories(model, found, recipe)
    views = model.hf_views()
    work = list(spans(weights.tensors, views))
    done, total = 0, sum(strip.nbytes for _, strip in work)
    for name, strip in work:
        target = views[name][strip.first : strip.first + strip.count]
        target.copy_(rows_as(weights, name, strip.first, strip.count, target.dtype))
        done += strip.nbytes
        progress(done, total)
    return model


def end_ids(found: Found, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a generation: what the model's files call eos, and what the tokenizer's do."""
    own = {tokenizer.eod}
    if tokenizer.location != BYTE:
        folder = Path(tokenizer.location)
        eos = _json(folder / "tokenizer_config.json").get("eos_token")
        name = eos.get("content") if isinstance(eos, dict) else eos
        ids = tokenizer.encode(name) if isinstance(name, str) else []
        own |= _ends(folder) | (set(ids) if len(ids) == 1 else set())
    return found.ends | own


def _ends(folder: Path) -> frozenset[int]:
    ends: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        given = _json(folder / file).get("eos_token_id")
        ends |= {i for i in (given if isinstance(given, list) else [given]) if isinstance(i, int)}
    return frozenset(ends)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"not JSON: {error}", str(file), "download the model again") from error
    return content if isinstance(content, dict) else {}


def _load_histories(model: Decoder, found: Found, recipe: Recipe) -> None:
    """Under delayed scaling, scales follow from amaxes of earlier training steps."""
    states = model.quantiser_tensors()
    if not states:
        return
    weights = found.weights
    if not isinstance(weights, NativeWeights) or weights.content["state"]["engine"].get("recipe") != recipe.hash:
        what = f"recipe {recipe.name} scales by amaxes of earlier steps, which only a checkpoint trained with it has"
        raise InputError(what, "--recipe", "--recipe bf16, or give the checkpoint of such a run")
    loaded = CheckpointStore(weights.path.parent).load(weights.path, dict.fromkeys(states))
    for name, tensor in states.items():
        tensor.copy_(loaded.tensors[name])
