"""Options that several training commands share, declared once."""

from __future__ import annotations

from typing import Annotated

from typer import Option as Opt

Size = Annotated[str | None, Opt("--size", help="tiny, small, 0.5b, 1.5b, 3b or 7b.")]
From = Annotated[str | None, Opt("--from", help="Hub id, HF folder, run or checkpoint to start from.")]
Scratch = Annotated[bool, Opt("--from-scratch", help="Start from random weights.")]
Recipe = Annotated[str | None, Opt("--recipe", help="Precision recipe, see `infir2 recipes list`.")]
Steps = Annotated[int | None, Opt("--steps", help="Optimizer steps.")]
GlobalBatch = Annotated[int | None, Opt("--global-batch", help="Sequences of one optimizer step.")]
LR = Annotated[float | None, Opt("--lr", help="Peak learning rate.")]
MinLR = Annotated[float | None, Opt("--min-lr", help="Learning rate at the end of the decay.")]
WeightDecay = Annotated[float | None, Opt("--weight-decay", help="Decoupled; none on norms and biases.")]
Beta1 = Annotated[float | None, Opt("--beta1", help="AdamW.")]
Beta2 = Annotated[float | None, Opt("--beta2", help="AdamW.")]
Eps = Annotated[float | None, Opt("--eps", help="AdamW.")]
Clip = Annotated[float | None, Opt("--clip", help="Global gradient norm; 0 turns clipping off.")]
Seed = Annotated[int | None, Opt("--seed", help="Of weights and data order.")]
InitStd = Annotated[float | None, Opt("--init-std", help="Standard deviation of random weights.")]
EvalEvery = Annotated[int | None, Opt("--eval-every", help="Steps between validations; 0 turns them off.")]
SaveEvery = Annotated[int | None, Opt("--save-every", help="Steps between checkpoints.")]
KeepLast = Annotated[int | None, Opt("--keep-last", help="Newest checkpoints that are kept.")]
KeepEvery = Annotated[int | None, Opt("--keep-every", help="Multiples of this step are kept until the decay is done.")]
Recompute = Annotated[str | None, Opt("--recompute", help="none, selective or full.")]
MaxSkips = Annotated[int | None, Opt("--max-skips", help="Non-finite steps in a row before the run gives up.")]
Name = Annotated[str | None, Opt("--name", help="Name of the run instead of the generated one.")]
New = Annotated[bool, Opt("--new", help="Start another run even when this one exists.")]
Runs = Annotated[str | None, Opt("--runs", help="Folder of run folders.")]
Device = Annotated[str | None, Opt("--device", help="cpu or cuda; default: cuda when there is one.")]
Processes = Annotated[int | None, Opt("--ranks", help="Data-parallel processes on this machine.")]
Deterministic = Annotated[bool, Opt("--deterministic", help="Repeatable GPU kernels, slower.")]
SkipLoadCheck = Annotated[bool, Opt("--skip-load-check", help="Train even if loaded weights score as random.")]
DryRun = Annotated[bool, Opt("--dry-run", help="Print the plan and stop.")]
