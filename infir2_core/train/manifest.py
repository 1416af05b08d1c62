"""The manifest of a native checkpoint: what a folder must hold to count as a checkpoint, and whether it does.

A checkpoint is a folder `step-00001000` with one `rank-00000.safetensors` per rank that wrote it and a
`manifest.json`, written last:

    format   version number of this layout
    step     the training step after which it was taken
    world    number of ranks that wrote it
    files    name -> {bytes, sha256}
    tensors  name -> {dtype, shape (global), parts: [{file, offset, rows}]}; offset and rows count dim 0
    state    whatever the caller needs to go on: data position, random states, schedule, recipe hash ...
    sha256   of everything above, so that a damaged manifest is seen too

Nothing here needs torch, so that listing runs stays quick. Reading and writing tensors is checkpoint.py's job.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import InputError

FORMAT = 1
NAME = "manifest.json"
HINT = "use an older checkpoint, or let the run pick the newest intact one by itself"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def folder_name(step: int) -> str:
    """Name of the checkpoint folder of a step."""
    return f"step-{step:08d}"


def file_name(rank: int) -> str:
    """Name of a rank's file inside a checkpoint folder."""
    return f"rank-{rank:05d}.safetensors"


def step_of(path: Path) -> int | None:
    """The step that a folder name stands for; None for anything that is not a finished checkpoint folder."""
    match = _STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """All `step-N` folders (intact or not), newest first. Folders being written (`.tmp`) are not among them."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def seal(content: dict[str, Any]) -> str:
    """The manifest text: `content` with the sha256 of its canonical form added."""
    return json.dumps({**content, "sha256": _digest(content)}, indent=1, allow_nan=False) + "\n"


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check the manifest of checkpoint folder `path` (tensor files are not looked at).

    Raises:
        InputError: it is missing, damaged, of an unknown format, or of another step than its folder says.
    """
    file = path / NAME
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise InputError("this is not a complete checkpoint: its manifest is missing", str(file), HINT) from None
    except OSError as error:
        raise InputError(f"the manifest cannot be read: {error.strerror}", str(file)) from error
    except ValueError as error:  # covers JSON and UTF-8
        raise InputError(f"the manifest is damaged: {error}", str(file), HINT) from error
    if not isinstance(content, dict) or "format" not in content:
        raise InputError("the manifest is damaged: it has no format number", str(file), HINT)
    if content["format"] != FORMAT:
        raise InputError(
            f"checkpoint format {content['format']!r} is unknown; this version of infir2 reads format {FORMAT}",
            str(file),
            "use the version of infir2 that wrote it",
        )
    digest = content.pop("sha256", None)
    if digest != _digest(content):
        raise InputError("the manifest is damaged: its content does not match its sha256", str(file), HINT)
    if step_of(path) not in (None, content["step"]):
        raise InputError(f"the manifest is of step {content['step']}, its folder of another", str(file), HINT)
    return content


def check_sizes(path: Path, content: dict[str, Any], names: list[str] | None = None) -> None:
    """Check that the files exist with the sizes recorded; quick, and blind to flipped bits.

    Raises:
        InputError: naming the file that is missing, truncated or too long.
    """
    for name in content["files"] if names is None else names:
        expected, file = content["files"][name]["bytes"], path / name
        try:
            size = file.stat().st_size
        except OSError:
            raise InputError("a file of the checkpoint is missing", str(file), HINT) from None
        if size != expected:
            kind = "truncated" if size < expected else "damaged"
            raise InputError(f"the file is {kind}: {size} bytes instead of {expected}", str(file), HINT)


def check_hashes(path: Path, content: dict[str, Any], names: list[str] | None = None) -> None:
    """Check sizes, then the sha256 of each file (all of them unless `names` says which); files in parallel.

    Raises:
        InputError: naming the file that does not match.
    """
    names = list(content["files"]) if names is None else names
    check_sizes(path, content, names)

    def check(name: str) -> None:
        try:
            with (path / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InputError(f"the file cannot be read: {error.strerror}", str(path / name)) from error
        if digest != content["files"][name]["sha256"]:
            raise InputError("the file is damaged: its sha256 is not the one in the manifest", str(path / name), HINT)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(check, names))


def newest_complete(folder: Path) -> Path | None:
    """Newest checkpoint whose manifest and file sizes are right. No hashing: for lists and look-ups, not to resume."""
    for path in step_folders(folder):
        try:
            check_sizes(path, read_manifest(path))
        except InputError:
            continue
        return path
    return None
