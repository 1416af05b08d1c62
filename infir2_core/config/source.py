"""What `--from` and `--load` may name, and the architecture of the weights found there.

A reference is a folder (a run, one of its checkpoints, or a Hugging Face model), the name of a run, or a hub id; which
one it is follows from what the folder holds. No tensor is loaded: only config.json, or a checkpoint's manifest and its
run's config.toml, are read, so that a contradiction with `--size` is known before any weight is touched.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import InputError, nearest
from ..hub import HUB_ID, snapshot
from .hf_config import KEYS, shape_from_hf
from .presets import list_presets, load_preset
from .runfile import CONFIG, read_config
from .schema import ModelShape, RunConfig

MANIFEST = "manifest.json"  # makes a folder a checkpoint
CHECKPOINTS = "checkpoints"  # makes a folder a run, beside config.toml
# What a size fixes. Vocabulary, positions, rope base and eps differ between variants and are taken from the weights.
FIXED = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim")


@dataclass(frozen=True)
class Weights:
    """Weights to start from: an absolute folder, and the architecture that the file `config` declares.

    `run` holds the settings of the run around a checkpoint; None for a Hugging Face folder or a checkpoint moved away.
    """

    kind: Literal["hf", "checkpoint"]
    path: Path
    shape: ModelShape
    config: Path
    run: RunConfig | None = None
    gone: bool = False  # the folder is not there any more; a run that started from it has checkpoints of its own

    @property
    def step(self) -> int:
        """The step of a checkpoint, from its folder's name; 0 for anything else."""
        found = re.fullmatch(r"step-(\d+)", self.path.name)
        return int(found[1]) if found else 0


def find_weights(reference: str, base: Path, runs: Path, where: str, download: bool = True) -> Weights:
    """The weights that `reference` names.

    Args:
        reference: hub id, Hugging Face folder, run name, run folder or checkpoint folder.
        base: absolute folder that relative paths count from.
        runs: folder of run folders, for names of runs.
        where: flag or file and line that gave the reference, as shown in errors.
        download: False fetches only config.json of a hub model.

    Raises:
        InputError: nothing is there, it is none of these, it is damaged, or the hub cannot be reached.
    """
    for folder in (base / Path(reference).expanduser(), runs / reference):
        if folder.is_dir():
            return _open(Path(os.path.normpath(folder)), where)
        if folder.exists():
            hint = "give the folder, not a file in it"
            raise InputError(f"'{reference}' is a file, expected a folder or a hub id", where, hint)
        if started := _started_from(Path(os.path.normpath(folder)), runs):
            return started
    if HUB_ID.fullmatch(reference):
        return _download(reference, where, download)
    known = [path.name for path in runs.iterdir() if path.is_dir()] if runs.is_dir() else []
    hint = nearest(reference, known) if known else "give a hub id such as Qwen/Qwen2.5-1.5B, or a folder that exists"
    raise InputError(f"'{reference}' is no folder, run or hub id", where, hint)


def _started_from(checkpoint: Path, runs: Path) -> Weights | None:
    """What a run in `runs` says of a checkpoint that it started from and that has been retired since."""
    for file in sorted(runs.glob(f"*/{CONFIG}")):
        try:
            run = read_config(file)
        except InputError:
            continue  # another run's trouble
        if run.source.kind == "checkpoint" and run.source.path == str(checkpoint):
            return Weights("checkpoint", checkpoint, run.model, file, run, gone=True)
    return None


def newest_run(runs: Path, title: str, size: str | None) -> Weights | None:
    """The newest complete checkpoint of the run of stage `title` (such as "sft-1") that was written to last.

    Args:
        size: None for any.
    """
    found: list[tuple[float, Weights]] = []
    for file in sorted(runs.glob(f"*/{CONFIG}")):
        try:
            run = read_config(file)
            if run.title == title and size in (None, run.size) and (file.parent / CHECKPOINTS).is_dir():
                weights = open_native(file.parent, str(file.parent))
                found.append(((weights.path / MANIFEST).stat().st_mtime, weights))
        except InputError:
            continue  # damaged, or without a checkpoint so far
    return max(found, key=lambda pair: pair[0])[1] if found else None


def matching_size(shape: ModelShape) -> str | None:
    """The size whose preset has this architecture."""
    return next((p.size for p in list_presets() if all(getattr(p.model, f) == getattr(shape, f) for f in FIXED)), None)


def check_size(size: str, weights: Weights, where: str) -> None:
    """Refuses weights of another architecture than `size`.

    Raises:
        InputError: naming, for each key that differs, both numbers.
    """
    preset = load_preset(size).model
    different = []
    for name in FIXED:
        wanted, found = getattr(preset, name), getattr(weights.shape, name)
        if wanted != found:
            key = KEYS[name] if weights.kind == "hf" else name
            different.append(f"{name} is {wanted} for {size} and {found} in the weights ({key})")
    if different:
        other = matching_size(weights.shape)
        hint = f"--size {other}" if other else "the weights fit none of the sizes; infir2 presets list shows them"
        raise InputError(
            f"size {size} contradicts the weights: {'; '.join(different)}", f"{where}: {weights.config}", hint
        )


def open_native(folder: Path, where: str) -> Weights:
    """The checkpoint that a checkpoint folder is, or the newest complete one of a run folder.

    Raises:
        InputError: neither, a run without a complete checkpoint, or a manifest that does not say what model it holds.
    """
    if (folder / MANIFEST).is_file():
        return _checkpoint(folder)
    if (folder / CONFIG).is_file() and (folder / CHECKPOINTS).is_dir():
        saved = [p for p in (folder / CHECKPOINTS).iterdir() if re.fullmatch(r"step-\d+", p.name)]
        whole = sorted((p for p in saved if (p / MANIFEST).is_file()), key=lambda p: int(p.name[5:]))
        if not whole:
            raise InputError("this run has no complete checkpoint", str(folder / CHECKPOINTS), "train it further")
        return _checkpoint(whole[-1])
    wanted = f"{MANIFEST} (a checkpoint) or {CONFIG} and {CHECKPOINTS}/ (a run)"
    raise InputError(f"no checkpoint here: the folder has neither {wanted}", f"{where}: {folder}")


def _open(folder: Path, where: str) -> Weights:
    if (folder / MANIFEST).is_file() or ((folder / CONFIG).is_file() and (folder / CHECKPOINTS).is_dir()):
        return open_native(folder, where)
    if (folder / "config.json").is_file():
        if not any(folder.glob("*.safetensors")):
            found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "none"
            hint = "only safetensors are read; convert with transformers, or download the model again"
            raise InputError(f"no safetensors weights here (other weights: {found})", f"{where}: {folder}", hint)
        return _hf(folder)
    wanted = f"{MANIFEST} (a checkpoint), {CONFIG} and {CHECKPOINTS}/ (a run) or config.json (a Hugging Face model)"
    raise InputError(f"no weights here: the folder has neither {wanted}", f"{where}: {folder}", "choose another folder")


def _checkpoint(folder: Path) -> Weights:
    """The manifest says which model a checkpoint holds; its run's settings come along when the run is around it."""
    file = folder / MANIFEST
    try:
        shape = ModelShape.model_validate(json.loads(file.read_text(encoding="utf-8"))["state"]["engine"]["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "use another checkpoint of the run"
        raise InputError("the checkpoint does not say what model it holds", str(file), hint) from error
    config = folder.parent.parent / CONFIG
    run = read_config(config) if folder.parent.name == CHECKPOINTS and config.is_file() else None
    return Weights("checkpoint", folder, shape, config if run else file, run)


def _hf(folder: Path) -> Weights:
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"config.json cannot be read: {error}", str(file), "download the model again") from error
    if not isinstance(content, dict):
        raise InputError("config.json is not an object", str(file), "download the model again")
    return Weights("hf", folder, shape_from_hf(content, str(file)), file)


def _download(hub_id: str, where: str, everything: bool) -> Weights:
    """config.json alone comes before the weights: a model of the wrong kind costs no gigabytes."""
    found = _hf(snapshot(hub_id, where, ("config.json",)))
    if everything:
        _open(snapshot(hub_id, where), f"{where}: {hub_id}")
    return found
