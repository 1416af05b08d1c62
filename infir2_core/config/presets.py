"""The model sizes infir2 knows: one TOML file each in presets/, with the architecture and every default of its stages.

A preset is the lowest layer of a run's settings: the project file and the command line override it (resolve.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError, nearest
from . import toml
from .rl import RlSettings, RlStage
from .schema import SIZES, CptSettings, ModelShape, SftSettings, SftStage, Strict

FOLDER = Path(__file__).parent / "presets"


class PresetFile(Strict):
    """The content of presets/SIZE.toml."""

    format: Literal[1]
    description: str
    model: ModelShape
    cpt: CptSettings
    sft: dict[SftStage, SftSettings]
    rl: dict[RlStage, RlSettings]


class Preset(Strict):
    """A model size: its architecture and the default settings of every stage."""

    size: str
    description: str
    model: ModelShape
    cpt: CptSettings
    sft: dict[SftStage, SftSettings]
    rl: dict[RlStage, RlSettings]

    @property
    def tokens(self) -> int:
        """Tokens of a full continual pre-training run."""
        return self.cpt.steps * self.cpt.global_batch * self.cpt.seq_len

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the parameter count and the tokens of a full run added."""
        return {**self.model_dump(mode="json"), "parameters": self.model.parameters, "tokens": self.tokens}


def list_presets() -> list[Preset]:
    """Every preset, smallest model to largest."""
    return [load_preset(size) for size in SIZES]


@cache
def load_preset(size: str) -> Preset:
    """The preset called `size`.

    Raises:
        InputError: no such size (with the nearest one).
    """
    if size not in SIZES:
        raise InputError(f"no preset for size '{size}'", hint=nearest(size, SIZES))
    path = FOLDER / f"{size}.toml"
    text = toml.read_text(path)
    content = toml.validate(PresetFile, toml.parse(text, str(path)), text, str(path), "preset")
    return Preset(
        size=size,
        description=content.description,
        model=content.model,
        cpt=content.cpt,
        sft=content.sft,
        rl=content.rl,
    )
