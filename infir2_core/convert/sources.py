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
    folder = Path(reference).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(f"'{reference}' is a file, expected a folder or a hub id", where, "give the folder")
    if HUB_ID.fullmatch(reference):
        weight_shape(read_config(snapshot(reference, where, ("config.json",))), reference)
        return snapshot(reference, where)
    raise InputError(f"'{reference}' is neither a folder nor a hub id", where, "check the path")
