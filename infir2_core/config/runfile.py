"""config.toml of a run folder: written before anything starts, read back exactly, compared, and named after.

`fingerprint` gives the run's default name, so the same settings find the same folder again; `differences` says what a
run folder of that name holds instead.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ..errors import InputError
from . import toml
from .schema import FORMAT, RunConfig

CONFIG = "config.toml"
# Where a run is kept and what it runs on do not change what it computes.
OUTSIDE = {"name", "runs", "device", "ranks"}


def write_config(config: RunConfig, path: Path) -> None:
    """Writes a run's settings; the file appears complete or not at all. An `OSError` is left to the caller."""
    toml.write(path, config.model_dump(mode="json", exclude_none=True))


def read_config(path: Path) -> RunConfig:
    """Reads what `write_config` wrote.

    Raises:
        InputError: missing, damaged, or of another format.
    """
    text = toml.read_text(path)
    data = toml.parse(text, str(path))
    if data.get("format") != FORMAT:
        found = repr(data["format"]) if "format" in data else "missing"
        what = f"run folder format is {found}; this version of infir2 reads format {FORMAT}"
        place = f"{path}:{toml.locate(text, 'format')}"
        raise InputError(what, place, "use the version that made the run")
    return toml.validate(RunConfig, data, text, str(path), "run settings")


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """Settings in which `b` differs from `a`, as `cpt.lr: 0.001 -> 0.002`; `OUTSIDE` does not count."""
    old, new = (_flat(_identity(config)) for config in (a, b))
    return [
        f"{key}: {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]


def fingerprint(config: RunConfig, root: Path) -> str:
    """6 hexadecimal digits over all settings but name, runs folder and device.

    Paths inside `root` (the project's folder) count relative to it, so a copy of the project gives the same digits.
    """
    data = _identity(config)
    data["source"]["path"] = _portable(data["source"]["path"], root)
    data[config.stage]["recipe"] = _portable(config.train.recipe, root)
    for blend in data["data"]:
        blend["prefix"] = _portable(blend["prefix"], root)
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:6]


def _identity(config: RunConfig) -> dict[str, Any]:
    """What a run is: a corpus counts by its content, wherever it lies, and that of fine-tuning is of token ids."""
    outside = OUTSIDE | ({"tokenizer"} if config.stage == "sft" else set())
    data = config.model_dump(mode="json", exclude=outside, exclude_none=True)
    for blend in data["data"]:
        if blend["content"]:
            blend["prefix"] = Path(blend["prefix"]).name
    return data


def _portable(path: str, root: Path) -> str:
    if not os.path.isabs(path) or not Path(path).is_relative_to(root):
        return path
    return Path(path).relative_to(root).as_posix()


def _flat(data: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(data, dict | list):
        return {key: data}
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    flat: dict[str, Any] = {}
    for name, value in pairs:
        flat |= _flat(value, f"{key}.{name}" if key else str(name))
    return flat


def _shown(value: Any) -> str:
    return "absent" if value is None else "(empty)" if value == "" else str(value)
