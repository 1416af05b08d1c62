"""From a resolved run to its end: the plan, the run folder, training. Shared by the commands that train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .output import emit, say, table

if TYPE_CHECKING:
    from infir2_core.config.layers import Resolved
    from infir2_core.config.schema import RunConfig
    from infir2_core.launch.plan import Plan


def start(resolved: Resolved, new: bool, dry_run: bool) -> None:
    """Trains, or with `dry_run` prints the plan; raises `typer.Exit` with the exit code.

    Raises:
        Infir2Error: whatever makes the run impossible, or ended it.
    """
    from infir2_core.errors import InputError
    from infir2_core.launch.plan import make_plan
    from infir2_core.precision.recipe import load_recipe

    config, notes = resolved.config, resolved.notes
    chosen = load_recipe(config.train.recipe)
    if missing := chosen.missing():
        what = f"recipe {chosen.name} needs what is not implemented: {', '.join(missing)}"
        raise InputError(what, "--recipe", "infir2 recipes list shows the recipes that run")
    plan = make_plan(config, chosen)
    if dry_run:
        emit(
            {"config": config.model_dump(mode="json", exclude_none=True), "plan": plan, "notes": notes}
            | {"recipe": chosen.hash},
            lambda: _show_plan(config, plan, notes),
        )
        return
    from infir2_core.launch.local import open_run

    from .running import run

    folder = open_run(config, chosen, new)
    for line in notes:
        say(f"note: {line}")
    code, result = run(folder)
    emit(result)
    raise typer.Exit(code)


def _show_plan(config: RunConfig, plan: Plan, notes: list[str]) -> None:
    gib, train = 2**30, config.train
    origin = config.source.path or config.source.kind
    rows = [
        ["run", f"{config.runs}/{config.name}"],
        ["model", f"{config.size}, {plan.parameters / 1e6:,.1f} M parameters, from {origin}"],
        ["recipe", train.recipe],
        ["tokens", f"{plan.tokens:,} ({_count(train.steps, 'step')} of {plan.tokens_per_step:,})"],
        ["model FLOPs", f"{plan.flops:.3g}: {plan.flops / 400e12 / 86400:,.2f} device-days at 400 TFLOPS"],
        [
            "memory a device",
            f"{plan.memory_bytes / gib:.2f} GB: state {plan.state_bytes / gib:.2f}, the rest activations",
        ],
        ["peak disk", f"{plan.peak_disk_bytes / gib:.2f} GB, {plan.checkpoint_bytes / gib:.2f} a checkpoint"],
        ["device", f"{config.device} x {config.ranks}"],
    ]
    if config.sft and config.chat:
        chat, epochs = config.chat, _count(config.sft.epochs, "epoch")
        trained = f"{chat.trained_tokens / chat.tokens:.1%} of its {chat.tokens:,} tokens trained on"
        rows.insert(3, ["samples", f"{epochs} of {chat.samples:,} ({chat.held_out:,} held out), {trained}"])
        rows.insert(4, ["tokenizer", config.tokenizer])
    table("Plan (nothing was started)", ["", ""], rows + [["note", note] for note in notes])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
