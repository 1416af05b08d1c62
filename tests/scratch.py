"""The settings of a run from random weights whose data a test brings itself."""

from __future__ import annotations

from typing import Any

from infir2_core.config.presets import load_preset
from infir2_core.config.schema import Blend, RunConfig, Source


def scratch_config(size: str, **settings: Any) -> RunConfig:
    """Continual pre-training of a preset, with some of its settings replaced."""
    preset = load_preset(size)
    return RunConfig(
        name="scratch",
        runs="-",
        size=size,
        model=preset.model,
        source=Source(kind="scratch"),
        data=[Blend(prefix="-", weight=1.0, content="")],
        cpt=preset.cpt.model_copy(update=settings),
    )
