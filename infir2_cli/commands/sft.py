"""`infir2 sft`: fine-tuning on conversations, in two stages. Parse, plan, run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option as Opt

from .. import options as o
from ..output import DebugFlag, JsonFlag, guarded


@guarded
def sft(
    stage: Annotated[str | None, Opt(help="1 or 2; stage 2 starts from the end of stage 1.")] = None,
    size: o.Size = None,
    from_: o.From = None,
    from_scratch: o.Scratch = False,
    data: Annotated[str | None, Opt(help="File or folder of chats: JSONL or Parquet.")] = None,
    tokenizer: Annotated[str | None, Opt(help="Folder or hub id of tokenizer and chat template, or byte.")] = None,
    recipe: o.Recipe = None,
    epochs: Annotated[int | None, Opt(help="How often each sample is trained on.")] = None,
    steps: Annotated[int | None, Opt(help="Stop earlier: optimizer steps instead of all that the epochs take.")] = None,
    global_batch: o.GlobalBatch = None,
    row_tokens: Annotated[int | None, Opt(help="Most tokens of one forward and backward pass.")] = None,
    max_tokens: Annotated[int | None, Opt(help="Most tokens of a sample.")] = None,
    too_long: Annotated[str | None, Opt(help="What becomes of longer samples: drop or truncate.")] = None,
    max_bad_share: Annotated[float | None, Opt(help="Share of unusable samples above which nothing starts.")] = None,
    schedule: Annotated[str | None, Opt(help="cosine or constant.")] = None,
    lr: o.LR = None,
    min_lr: o.MinLR = None,
    warmup_share: Annotated[float | None, Opt(help="Share of the steps that is linear warm-up.")] = None,
    weight_decay: o.WeightDecay = None,
    beta1: o.Beta1 = None,
    beta2: o.Beta2 = None,
    eps: o.Eps = None,
    clip: o.Clip = None,
    seed: o.Seed = None,
    init_std: o.InitStd = None,
    eval_share: Annotated[float | None, Opt(help="Share of samples that is held out.")] = None,
    eval_every: o.EvalEvery = None,
    prompts: Annotated[list[str] | None, Opt("--prompt", help="Answered at each validation; repeat.")] = None,
    answers: Annotated[int | None, Opt(help="Held-out prompts answered at each validation.")] = None,
    answer_tokens: Annotated[int | None, Opt(help="Most tokens of such an answer.")] = None,
    save_every: o.SaveEvery = None,
    keep_last: o.KeepLast = None,
    keep_every: o.KeepEvery = None,
    recompute: o.Recompute = None,
    max_skips: o.MaxSkips = None,
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
    """Fine-tune a model on conversations; only what the assistant says is trained. The same command again resumes."""
    flags = {k: v for k, v in locals().items() if k not in ("new", "dry_run", "json", "debug")}
    from infir2_core.config.project import find_project, load_project
    from infir2_core.config.resolve_sft import SftFlags, resolve_sft
    from infir2_core.config.schema import SftSettings
    from infir2_core.data.chat_measure import measure
    from infir2_core.machine import pick_device

    from ..progress import RecordsBar
    from ..starting import start

    flags["device"] = pick_device(device)
    settings = {name: flags.pop(name) for name in SftSettings.model_fields}
    where = find_project(Path.cwd())
    project = load_project(where) if where else None
    given = SftFlags(**flags, settings=settings)
    with RecordsBar("tokenising") as bar:
        counted = partial(measure, progress=bar.update)
        resolved = resolve_sft(given, project, Path.cwd(), counted, download=not dry_run)
    start(resolved, new, dry_run)
