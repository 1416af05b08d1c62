"""Flags over project file over preset: one resolved, checked `RunConfig` of a continual pre-training run.

Every rule that needs more than one key is checked here, and an error names the flag, or the file and line, that set the
value. What is derived rather than given (a shortened warm-up, a size read from the weights) is told in `notes`. With
`--phase decay` the settings of the loaded run take the preset's place. Nothing is written and no weight is read;
finding weights is source.py's job, data mixture.py's,
config.toml runfile.py's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, UsageError, nearest
from .layers import Resolved, Settings, check_name, check_ranks, layered, named
from .mixture import absolute, mixture
from .presets import load_preset
from .project import ProjectFile
from .runfile import differences, read_config, write_config
from .schema import SCRATCH_SIZES, SIZES, CptSettings, RunConfig, Source, TrainSettings
from .source import Weights, check_size, find_weights, matching_size

__all__ = ["CptFlags", "Resolved", "differences", "read_config", "resolve_cpt", "write_config"]

# Settings that describe the full run; a decay phase does not take them from the project file.
_FULL_RUN_ONLY = ("steps", "warmup_steps", "schedule")


@dataclass(frozen=True)
class CptFlags:
    """The flags of `infir2 cpt`; None (or False) where one was not given. Settings are those of `CptSettings`."""

    size: str | None = None
    from_: str | None = None
    from_scratch: bool = False
    data: list[str] | None = None
    tokens: float | None = None
    phase: str | None = None
    load: str | None = None
    name: str | None = None
    runs: str | None = None
    device: str = "cpu"
    ranks: int | None = None
    deterministic: bool = False
    skip_load_check: bool = False
    recipe: str | None = None
    steps: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    schedule: str | None = None
    lr: float | None = None
    min_lr: float | None = None
    warmup_steps: int | None = None
    decay_steps: int | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    clip: float | None = None
    seed: int | None = None
    init_std: float | None = None
    split: str | None = None
    eval_every: int | None = None
    eval_iters: int | None = None
    save_every: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    recompute: str | None = None
    max_skips: int | None = None

    def settings(self) -> dict[str, Any]:
        """The given `CptSettings`, by name."""
        given = {name: getattr(self, name) for name in CptSettings.model_fields}
        return {name: value for name, value in given.items() if value is not None}


def resolve_cpt(flags: CptFlags, project: ProjectFile | None, cwd: Path, download: bool = True) -> Resolved:
    """Everything a continual pre-training run needs to know.

    Args:
        flags: from the command line; relative paths count from `cwd`.
        project: the project file, if there is one; its paths count from its own folder.
        cwd: absolute.
        download: False fetches only config.json of a hub model (for plans that are not run).

    Raises:
        UsageError: flags that exclude each other or miss another one.
        InputError: any setting, weights or data that cannot be used; says which flag or line gave it.
    """
    decay = _check_flags(flags)
    root = project.folder if project else cwd
    runs = absolute(flags.runs, cwd) if flags.runs else absolute(project.project.runs if project else "runs", root)
    notes: list[str] = []
    size, weights = _model(flags, project, cwd, runs, decay, download, notes)
    model = weights.shape if weights else load_preset(size).model
    settings = _layers(flags, project, cwd, size, weights if decay else None)
    if decay and weights:
        _decay_length(settings, flags, size, weights, notes)
    else:
        _length(settings, flags, project, size, notes)
    ranks = check_ranks(flags.ranks)
    cpt = _validated(settings, ranks)
    if cpt.seq_len > model.max_positions:
        raise InputError(
            f"seq_len ({cpt.seq_len}) is above the {model.max_positions} positions of the model",
            settings.origin["seq_len"],
            f"--seq-len {model.max_positions}",
        )
    earlier = weights.run.data if decay and weights and weights.run else []
    data, tokenizer = mixture(flags.data or [], project, earlier, cwd, model.vocab)
    source = Source(kind="scratch")
    if weights:
        source = Source(kind=weights.kind, path=str(weights.path), optimizer=decay, check=not flags.skip_load_check)
    config = RunConfig(
        phase="decay" if decay else "full",
        name="unnamed",
        runs=str(runs),
        size=size,
        model=model,
        source=source,
        data=data,
        tokenizer=tokenizer,
        cpt=cpt,
        device=flags.device,
        ranks=ranks,
        deterministic=flags.deterministic,
    )
    return named(config, flags.name, root, notes)


def _check_flags(flags: CptFlags) -> bool:
    """Refuses flags that do not go together; True for `--phase decay`."""
    if flags.phase not in (None, "full", "decay"):
        raise UsageError(f"no phase '{flags.phase}'", "--phase", nearest(flags.phase, ("full", "decay")))
    decay = flags.phase == "decay"
    example = "--phase decay --load RUN/checkpoints/step-N"
    if flags.from_ is not None and flags.from_scratch:
        raise UsageError("--from and --from-scratch exclude each other", "--from, --from-scratch", "keep one of them")
    if flags.steps is not None and flags.tokens is not None:
        raise UsageError("--steps and --tokens both say how long to train", "--steps, --tokens", "keep one of them")
    if flags.load is not None and not decay:
        raise UsageError("--load belongs to the decay phase", "--load", f"{example}, or --from to take weights only")
    if decay and flags.load is None:
        raise UsageError("the decay phase needs a checkpoint to load", "--phase decay", example)
    if decay and (flags.from_ is not None or flags.from_scratch):
        given = "--from" if flags.from_ is not None else "--from-scratch"
        raise UsageError(f"the decay phase starts from --load, not {given}", f"--phase decay, {given}", example)
    if decay and flags.warmup_steps:
        raise UsageError("the decay phase has no warm-up", "--warmup-steps", "leave it out")
    if decay and flags.schedule not in (None, "wsd"):
        raise UsageError(f"the decay phase is one of wsd, not of {flags.schedule}", "--schedule", "leave it out")
    check_ranks(flags.ranks)
    check_name(flags.name)
    return decay


def _model(
    flags: CptFlags,
    project: ProjectFile | None,
    cwd: Path,
    runs: Path,
    decay: bool,
    download: bool,
    notes: list[str],
) -> tuple[str, Weights | None]:
    """The size and the weights to start from; None for random ones."""
    size = flags.size or (project.model.size if project else None)
    where = "--size" if flags.size or not project else project.where("model.size")
    if size is not None:
        load_preset(size)
    reference, origin, base = _reference(flags, project, cwd)
    own = project.model.size if project else None
    if reference and origin != "--from" and not decay and flags.size in SCRATCH_SIZES and own not in (None, flags.size):
        notes.append(f"{origin} = {reference} is meant for size {own}; {flags.size} starts from random weights")
        reference = None
    if reference is None:
        if size is None:
            hint = f"add --size, or size under [model] in infir2.toml. Valid: {', '.join(SIZES)}."
            raise UsageError("no model size given", "--size", hint)
        if size not in SCRATCH_SIZES and not flags.from_scratch:
            what = f"size {size}: continual pre-training from random weights must be asked for"
            raise InputError(what, where, "--from HF_DIR to continue from weights, or --from-scratch")
        return size, None
    weights = find_weights(reference, base, runs, origin, download)
    if decay and weights.kind == "hf":
        hint = "give a checkpoint of an infir2 run: RUN/checkpoints/step-N"
        raise InputError("the decay phase needs optimizer state, and a Hugging Face folder has none", origin, hint)
    if decay and weights.run is None:
        hint = "keep the checkpoint in its run folder: RUN/checkpoints/step-N, beside RUN/config.toml"
        raise InputError("the decay phase needs the settings of the loaded run", f"{origin}: {weights.path}", hint)
    if decay and weights.run is not None and weights.run.stage != "cpt":
        what = f"{weights.run.name} is a run of {weights.run.title}, and a decay phase belongs to pre-training"
        raise InputError(what, origin, "infir2 sft --from takes its weights")
    if size is None:
        size = weights.run.size if weights.run else matching_size(weights.shape)
        if size is None:
            raise InputError("the weights fit none of the sizes", f"{origin}: {weights.config}", "infir2 presets list")
        notes.append(f"size {size}, read from {weights.config}")
    check_size(size, weights, where)
    return size, weights


def _reference(flags: CptFlags, project: ProjectFile | None, cwd: Path) -> tuple[str | None, str, Path]:
    """(reference, the place that gives it, folder its relative path counts from)."""
    if flags.load is not None:
        return flags.load, "--load", cwd
    if flags.from_ is not None:
        return flags.from_, "--from", cwd
    if project and not flags.from_scratch:
        for key, value in (("cpt.from", project.cpt.from_), ("model.from", project.model.from_)):
            if value:
                return value, project.where(key), project.folder
    return None, "", cwd


def _layers(flags: CptFlags, project: ProjectFile | None, cwd: Path, size: str, loaded: Weights | None) -> Settings:
    """The settings of the three layers put together; `loaded` replaces the preset in a decay phase."""
    base: TrainSettings = load_preset(size).cpt
    origin, own = f"preset {size}", project.cpt.settings() if project else {}
    if loaded and loaded.run and loaded.run.cpt:
        base, origin = loaded.run.cpt, str(loaded.config)
        own = {name: value for name, value in own.items() if name not in _FULL_RUN_ONLY}
    return layered(base, origin, project, "cpt", own, flags.settings(), cwd)


def _length(settings: Settings, flags: CptFlags, project: ProjectFile | None, size: str, notes: list[str]) -> None:
    """Steps from tokens; warm-up and decay of the preset cut to their share where they no longer fit."""
    values, preset = settings.values, load_preset(size).cpt
    tokens, where = flags.tokens, "--tokens"
    if tokens is None and flags.steps is None and project and project.cpt.tokens is not None:
        tokens, where = project.cpt.tokens, project.where("cpt.tokens")
    if tokens is not None:
        settings.over({"steps": _steps(tokens, settings, where, notes)}, {"steps": where})
    steps = values["steps"]
    parts = ["warmup_steps", "decay_steps"] if values["schedule"] == "wsd" else ["warmup_steps"]
    if steps < 1 or sum(values[name] for name in parts) <= steps:
        return
    for name in (name for name in parts if name not in settings.given):
        before = values[name]
        values[name] = steps * before // preset.steps
        notes.append(f"{name} {before} -> {values[name]}: the preset's share of {steps} steps")


def _decay_length(settings: Settings, flags: CptFlags, size: str, weights: Weights, notes: list[str]) -> None:
    """No warm-up, and a decay over the whole phase unless both lengths were given."""
    assert weights.run is not None and weights.run.cpt is not None
    loaded = weights.run.cpt
    stable = loaded.steps - loaded.decay_steps
    if not weights.gone and (weights.run.phase == "decay" or loaded.schedule != "wsd" or weights.step > stable):
        notes.append(f"{weights.path} is not from the stable phase: its learning rate had begun to fall already")
    values = settings.values
    decay = values["decay_steps"] or load_preset(size).cpt.decay_steps
    steps = flags.steps
    if flags.tokens is not None:
        steps = _steps(flags.tokens, settings, "--tokens", notes)
        settings.origin["steps"] = "--tokens"
    if steps is not None and flags.decay_steps is None:
        decay = steps
    values |= {"schedule": "wsd", "warmup_steps": 0, "decay_steps": decay, "steps": decay if steps is None else steps}
    notes.append(f"decay phase of {values['steps']} steps; other settings come from {weights.config} unless given")


def _steps(tokens: float, settings: Settings, where: str, notes: list[str]) -> int:
    if not math.isfinite(tokens) or tokens < 1 or tokens != int(tokens):
        raise InputError(f"tokens must be a whole number above 0, not {tokens:g}", where, "for example --tokens 2e9")
    batch = settings.values["global_batch"] * settings.values["seq_len"]
    if batch < 1:
        return 1  # the batch is refused by its own limits right after
    steps = -(-int(tokens) // batch)
    notes.append(f"{int(tokens):,} tokens are {steps:,} steps of {batch:,}")
    return steps


def _validated(settings: Settings, ranks: int) -> CptSettings:
    values = settings.values
    total, micro = values["global_batch"], values["micro_batch"]
    if total > 0 and micro > 0 and total % (micro * ranks):
        size = micro * ranks
        valid = max(1, (2 * total + size) // (2 * size)) * size
        places = dict.fromkeys([settings.origin["global_batch"], settings.origin["micro_batch"]])
        if ranks > 1:
            places["--ranks"] = None
        what = f"global_batch ({total}) must be a multiple of micro_batch ({micro}) x ranks ({ranks}) = {size}"
        raise InputError(what, ", ".join(places), f"--global-batch {valid} is the nearest valid value")
    return settings.checked(CptSettings)
