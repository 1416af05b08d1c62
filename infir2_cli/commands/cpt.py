"""`infir2 cpt`: continual pre-training. Parse, plan, run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option as Opt

from .. import options as o
from ..output import DebugFlag, JsonFlag, guarded


@guarded
def cpt(
    size: o.Size = None,
    from_: o.From = None,
    from_scratch: o.Scratch = False,
    data: Annotated[list[str] | None, Opt(help="[WEIGHT:]PREFIX of a prepared corpus; repeat to blend.")] = None,
    recipe: o.Recipe = None,
    steps: o.Steps = None,
    tokens: Annotated[float | None, Opt(help="Trained tokens, instead of --steps (2e9 works).")] = None,
    seq_len: Annotated[int | None, Opt(help="Tokens of one sequence.")] = None,
    global_batch: o.GlobalBatch = None,
    micro_batch: Annotated[int | None, Opt(help="Sequences of one forward and backward pass.")] = None,
    schedule: Annotated[str | None, Opt(help="wsd, cosine or constant.")] = None,
    lr: o.LR = None,
    min_lr: o.MinLR = None,
    warmup_steps: Annotated[int | None, Opt(help="Steps of linear warm-up.")] = None,
    decay_steps: Annotated[int | None, Opt(help="Steps of cosine decay at the end (wsd).")] = None,
    weight_decay: o.WeightDecay = None,
    beta1: o.Beta1 = None,
    beta2: o.Beta2 = None,
    eps: o.Eps = None,
    clip: o.Clip = None,
    seed: o.Seed = None,
    init_std: o.InitStd = None,
    split: Annotated[str | None, Opt(help="Shares of train,validation,test.")] = None,
    eval_every: o.EvalEvery = None,
    eval_iters: Annotated[int | None, Opt(help="Global batches of one validation.")] = None,
    save_every: o.SaveEvery = None,
    keep_last: o.KeepLast = None,
    keep_every: o.KeepEvery = None,
    recompute: o.Recompute = None,
    max_skips: o.MaxSkips = None,
    phase: Annotated[str | None, Opt(help="full, or decay with --load.")] = None,
    load: Annotated[str | None, Opt(help="Checkpoint that --phase decay starts from.")] = None,
    name: o.Name = None,
    new: o.New = False,
    runs: o.Runs = None,
    device: o.Device = None,
    ranks: o.Processes = None,
    deterministic: o.Deterministic = False,
    skip_load_check: o.SkipLoadCheck = False,
    dry_run: o.DryRun = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Continue pre-training a Qwen2.5-family model. The same command again resumes the run."""
    flags = {k: v for k, v in locals().items() if k not in ("new", "dry_run", "json", "debug")}
    from infir2_core.config.project import find_project, load_project
    from infir2_core.config.resolve import CptFlags, resolve_cpt
    from infir2_core.machine import pick_device

    from ..starting import start

    where = find_project(Path.cwd())
    flags["device"] = pick_device(device)
    project = load_project(where) if where else None
    start(resolve_cpt(CptFlags(**flags), project, Path.cwd(), download=not dry_run), new, dry_run)
