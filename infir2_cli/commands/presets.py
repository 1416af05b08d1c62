"""`infir2 presets list|show`: the model sizes and the default of every setting."""

from __future__ import annotations

from typing import Annotated

import typer

from ..output import DebugFlag, JsonFlag, emit, guarded, say, table

app = typer.Typer(help="Model sizes: architecture and default settings.", no_args_is_help=True)


@app.command("list")
@guarded
def list_(json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """All sizes, with their parameters and the tokens of a full run."""
    from infir2_core.config.presets import list_presets

    presets = list_presets()

    def human() -> None:
        rows = [[p.size, count(p.model.parameters), count(p.tokens), p.cpt.recipe, p.description] for p in presets]
        table("Presets", ["size", "parameters", "tokens", "recipe", "what"], rows)
        say("infir2 presets show SIZE prints every setting.")

    emit([preset.as_dict() for preset in presets], human)


@app.command("show")
@guarded
def show(
    size: Annotated[str, typer.Argument(help="tiny, small, 0.5b, 1.5b, 3b or 7b.")],
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Architecture and settings of one size, named as in infir2.toml and as flags of `infir2 cpt` and `infir2 sft`."""
    from infir2_core.config.presets import load_preset

    preset = load_preset(size)

    def human() -> None:
        say(preset.size, "bold")
        say(preset.description)
        say(f"parameters: {count(preset.model.parameters)} ({preset.model.parameters:,})")
        say(f"tokens of a full run: {count(preset.tokens)} ({preset.tokens:,})")
        table("Model", ["key", "value"], [[key, value(v)] for key, v in preset.model])
        table("[cpt]", ["key", "value"], [[key, value(v)] for key, v in preset.cpt])
        for stage, title, stages in (("sft", "Fine-tuning", preset.sft), ("rl", "Reinforcement learning", preset.rl)):
            one, two = (settings.model_dump() for settings in stages.values())
            rows = [[key, value(one[key]), value(two[key])] for key in one]
            table(title, ["key", f"[{stage}.1]", f"[{stage}.2]"], rows)

    emit(preset.as_dict(), human)


def count(number: int) -> str:
    """A large number for people: 167.8 B, 2.4 M."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:,.{2 if number < 10 * unit else 1}f} {name}"
    return str(number)


def value(setting: object) -> str:
    """A setting as it would be typed."""
    if isinstance(setting, bool):
        return str(setting).lower()
    return f"{setting:g}" if isinstance(setting, float) else str(setting)
