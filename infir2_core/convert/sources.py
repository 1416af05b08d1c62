"""What a conversion may be asked to read: a Hugging Face folder, or a hub id, which becomes a folder of the cache."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from ..hub import HUB_ID, snapshot
from .folder import read_config, weight_shape


def model_folder(reference: str, where: str) -> Path:
    """The Hugging Face folder that `reference` names; a hub id is downloaded, or found in the cache.

    Raises:
        InputError: neither a folder nor a hub id, or the hub has no such model or cannot be reached.
    """
    folder = _local(reference, where)
    if folder is None:
        weight_shape(read_config(snapshot(reference, where, ("config.json",))), reference)
        return snapshot(reference, where)
    return folder


def described(reference: str, where: str) -> Path:
    """As `model_folder`; of a hub model only what describes it is fetched: configs and card, no weights."""
    return _local(reference, where) or snapshot(reference, where, ("*.json", "*.md"))


def _local(reference: str, where: str) -> Path | None:
    """The folder of this name; None for a hub id."""
    folder = Path(reference).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(f"'{reference}' is a file, expected a folder or a hub id", where, "give the folder")
    if HUB_ID.fullmatch(reference):
        return None
    raise InputError(f"'{reference}' is neither a folder nor a hub id", where, "check the path")
