"""`infir2 cpt`: continual pre-training. Parse, plan, run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..output import DebugFlag, JsonFlag, emit, guarded, say, table

if TYPE_CHECKING:
    from infir2_core.config.schema import RunConfig
    from infir2_core.launch.plan import Plan

Opt = typer.Option


@guarded
def cpt(
    size: Annotated[str | None, Opt(help="tiny, small, 0.5b, 1.5b, 3b or 7b.")] = None,
    from_: Annotated[str | None, Opt("--from", help="Hub id, HF folder, run or checkpoint to start from.")] = None,
    from_scratch: Annotated[bool, Opt("--from-scratch", help="Start from random weights.")] = False,
    data: Annotated[list[str] | None, Opt(help="[WEIGHT:]PREFIX of a prepared corpus; repeat to blend.")] = None,
    recipe: Annotated[str | None, Opt(help="Precision recipe, see `infir2 recipes list`.")] = None,
    steps: Annotated[int | None, Opt(help="Optimizer steps.")] = None,
    tokens: Annotated[float | None, Opt(help="Trained tokens, instead of --steps (2e9 works).")] = None,
    seq_len: Annotated[int | None, Opt(help="Tokens of one sequence.")] = None,
    global_batch: Annotated[int | None, Opt(help="Sequences of one optimizer step.")] = None,
    micro_batch: Annotated[int | None, Opt(help="Sequences of one forward and backward pass.")] = None,
    schedule: Annotated[str | None, Opt(help="wsd, cosine or constant.")] = None,
    lr: Annotated[float | None, Opt(help="Peak learning rate.")] = None,
    min_lr: Annotated[float | None, Opt(help="Learning rate at the end of the decay.")] = None,
    warmup_steps: Annotated[int | None, Opt(help="Steps of linear warm-up.")] = None,
    decay_steps: Annotated[int | None, Opt(help="Steps of cosine decay at the end (wsd).")] = None,
    weight_decay: Annotated[float | None, Opt(help="Decoupled; none on norms and biases.")] = None,
    beta1: Annotated[float | None, Opt(help="AdamW.")] = None,
    beta2: Annotated[float | None, Opt(help="AdamW.")] = None,
    eps: Annotated[float | None, Opt(help="AdamW.")] = None,
    clip: Annotated[float | None, Opt(help="Global gradient norm; 0 turns clipping off.")] = None,
    seed: Annotated[int | None, Opt(help="Of weights and data order.")] = None,
    init_std: Annotated[float | None, Opt(help="Standard deviation of random weights.")] = None,
    split: Annotated[str | None, Opt(help="Shares of train,validation,test.")] = None,
    eval_every: Annotated[int | None, Opt(help="Steps between validations; 0 turns them off.")] = None,
    eval_iters: Annotated[int | None, Opt(help="Global batches of one validation.")] = None,
    save_every: Annotated[int | None, Opt(help="Steps between checkpoints.")] = None,
    keep_last: Annotated[int | None, Opt(help="Newest checkpoints that are kept.")] = None,
    keep_every: Annotated[int | None, Opt(help="Multiples of this step are kept until the decay is done.")] = None,
    recompute: Annotated[str | None, Opt(help="none, selective or full.")] = None,
    max_skips: Annotated[int | None, Opt(help="Non-finite steps in a row before the run gives up.")] = None,
    phase: Annotated[str | None, Opt(help="full, or decay with --load.")] = None,
    load: Annotated[str | None, Opt(help="Checkpoint that --phase decay starts from.")] = None,
    name: Annotated[str | None, Opt(help="Name of the run instead of the generated one.")] = None,
    new: Annotated[bool, Opt("--new", help="Start another run even when this one exists.")] = False,
    runs: Annotated[str | None, Opt(help="Folder of run folders.")] = None,
    device: Annotated[str | None, Opt(help="cpu or cuda; default: cuda when there is one.")] = None,
    ranks: Annotated[int | None, Opt(help="Data-parallel processes on this machine.")] = None,
    deterministic: Annotated[bool, Opt("--deterministic", help="Repeatable GPU kernels, slower.")] = False,
    skip_load_check: Annotated[
        bool, Opt("--skip-load-check", help="Train even if loaded weights score as random.")
    ] = False,
    dry_run: Annotated[bool, Opt("--dry-run", help="Print the plan and stop.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Continue pre-training a Qwen2.5-family model. The same command again resumes the run."""
    flags = {k: v for k, v in locals().items() if k not in ("new", "dry_run", "json", "debug")}
    from infir2_core.config.project import find_project, load_project
    from infir2_core.config.resolve import CptFlags, resolve_cpt
    from infir2_core.errors import InputError
    from infir2_core.launch.plan import make_plan
    from infir2_core.machine import pick_device
    from infir2_core.precision.recipe import load_recipe

    where = find_project(Path.cwd())
    flags["device"] = pick_device(device)
    project = load_project(where) if where else None
    resolved = resolve_cpt(CptFlags(**flags), project, Path.cwd(), download=not dry_run)
    config, notes = resolved.config, resolved.notes
    chosen = load_recipe(config.cpt.recipe)
    if missing := chosen.missing():
        what = f"recipe {chosen.name} needs what is not implemented: {', '.join(missing)}"
        raise InputError(what, "--recipe", "infir2 recipes list shows the recipes that run")
    plan = make_plan(config, chosen)
    if dry_run:
        emit(
            {"config": config, "plan": plan, "notes": notes, "recipe": chosen.hash},
            lambda: _show_plan(config, plan, notes),
        )
        return
    from infir2_core.launch.local import open_run

    from ..running import run

    folder = open_run(config, chosen, new)
    for line in notes:
        say(f"note: {line}")
    code, result = run(folder)
    emit(result)
    raise typer.Exit(code)


def _show_plan(config: RunConfig, plan: Plan, notes: list[str]) -> None:
    gib = 2**30
    origin = config.source.path or config.source.kind
    rows = [
        ["run", f"{config.runs}/{config.name}"],
        ["model", f"{config.size}, {plan.parameters / 1e6:,.1f} M parameters, from {origin}"],
        ["recipe", config.cpt.recipe],
        ["tokens", f"{plan.tokens:,} ({config.cpt.steps:,} steps of {plan.tokens_per_step:,})"],
        ["model FLOPs", f"{plan.flops:.3g}: {plan.flops / 400e12 / 86400:,.2f} device-days at 400 TFLOPS"],
        [
            "memory a device",
            f"{plan.memory_bytes / gib:.2f} GB: state {plan.state_bytes / gib:.2f}, the rest activations",
        ],
        ["peak disk", f"{plan.peak_disk_bytes / gib:.2f} GB, {plan.checkpoint_bytes / gib:.2f} a checkpoint"],
        ["device", f"{config.device} x {config.ranks}"],
    ]
    table("Plan (nothing was started)", ["", ""], rows + [["note", note] for note in notes])
