"""Flags over project file over preset: one resolved, checked `RunConfig` of a stage of fine-tuning.

What is asked of the data (how many samples it holds, what its content is) is answered by a function of the caller,
because that takes a tokenizer: `Measure`. The number of steps follows from it. Where nothing names the weights, stage 1
starts from the newest run of continual pre-training and stage 2 from the newest finished run of stage 1; `notes` say
so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ..errors import InputError, UsageError, nearest
from .layers import Resolved, check_name, check_ranks, layered, named
from .mixture import absolute
from .presets import load_preset
from .project import ProjectFile
from .schema import SIZES, Blend, ChatData, ModelShape, RunConfig, SftSettings, SftStage, Source
from .source import Weights, check_size, find_weights, matching_size, newest_run

BYTE = "byte"  # of data/tokenizer.py
CACHE = ".chat-cache"  # of tokenised chats, in the folder of runs
NO_DATA = "infir2 data chat-demo --out data/chat.jsonl"


@dataclass(frozen=True)
class Wanted:
    """What is to be measured: chats at `data`, by the tokenizer `tokenizer` (given at `where`), for a model."""

    data: Path
    tokenizer: str
    where: str
    settings: SftSettings
    model: ModelShape
    cache: Path


@dataclass(frozen=True)
class Measured:
    """What `Measure` found. `tokenizer` is "byte" or a local folder, `content` the digest of the tokenised set."""

    chat: ChatData
    content: str
    tokenizer: str
    notes: list[str]


Measure = Callable[[Wanted], Measured]


@dataclass(frozen=True)
class SftFlags:
    """The flags of `infir2 sft`; None (or False) where one was not given. `settings` are those of `SftSettings`."""

    stage: str | None = None
    size: str | None = None
    from_: str | None = None
    from_scratch: bool = False
    data: str | None = None
    tokenizer: str | None = None
    name: str | None = None
    runs: str | None = None
    device: str = "cpu"
    ranks: int | None = None
    deterministic: bool = False
    skip_load_check: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """Something that was named: the text, the flag or line that gave it, the folder a relative path counts from."""

    text: str
    where: str
    base: Path


def resolve_sft(
    flags: SftFlags, project: ProjectFile | None, cwd: Path, measure: Measure, download: bool = True
) -> Resolved:
    """Everything a run of fine-tuning needs to know.

    Args:
        flags: from the command line; relative paths count from `cwd`.
        project: the project file, if there is one; its paths count from its own folder.
        cwd: absolute.
        measure: tokenises the data, or finds it tokenised.
        download: False fetches only config.json of a hub model.

    Raises:
        UsageError: flags that exclude each other or miss another one.
        InputError: any setting, weights or data that cannot be used; says which flag or line gave it.
    """
    stage = _stage(flags)
    root = project.folder if project else cwd
    runs = absolute(flags.runs, cwd) if flags.runs else absolute(project.project.runs if project else "runs", root)
    notes: list[str] = []
    size, weights = _model(flags, project, cwd, runs, stage, download, notes)
    model = weights.shape if weights else load_preset(size).model
    section, key = project.sft.get(stage) if project else None, f"sft.{stage}"
    given = {name: value for name, value in flags.settings.items() if value is not None}
    settings = layered(
        load_preset(size).sft[stage], f"preset {size}", project, key, section.settings() if section else {}, given, cwd
    )
    sft = settings.checked(SftSettings)
    for key_of, most in (("max_tokens", model.max_positions), ("answer_tokens", model.max_positions - 1)):
        if (tokens := getattr(sft, key_of)) > most:
            what = f"{key_of} ({tokens}) is above what the {model.max_positions} positions of the model take"
            raise InputError(what, settings.origin[key_of], f"--{key_of.replace('_', '-')} {most}")
    data = _named(flags.data, "--data", section.data if section else "", project, f"{key}.data", cwd)
    if data is None:
        raise InputError("no chat data given", f"--data, or data under [{key}] in infir2.toml", NO_DATA)
    tokenizer = _tokenizer(flags, project, cwd, stage, weights, model)
    wanted = Wanted(absolute(data.text, data.base), tokenizer.text, tokenizer.where, sft, model, runs / CACHE)
    found = measure(wanted)
    notes += found.notes
    most = -(-sft.epochs * found.chat.samples // sft.global_batch)
    if sft.steps > most:
        what = f"{sft.steps} steps are more than {sft.epochs} epochs of {found.chat.samples:,} samples have ({most})"
        raise InputError(what, settings.origin["steps"], "give more --epochs, or leave --steps out")
    source = Source(kind="scratch")
    if weights:
        source = Source(kind=weights.kind, path=str(weights.path), check=not flags.skip_load_check)
    config = RunConfig(
        stage="sft",
        phase=stage,
        name="unnamed",
        runs=str(runs),
        size=size,
        model=model,
        source=source,
        data=[Blend(prefix=str(wanted.data), weight=1.0, content=found.content)],
        tokenizer=found.tokenizer,
        chat=found.chat,
        sft=sft.model_copy(update={"steps": sft.steps or most}),
        device=flags.device,
        ranks=check_ranks(flags.ranks),
        deterministic=flags.deterministic,
    )
    return named(config, flags.name, root, notes)


def _stage(flags: SftFlags) -> SftStage:
    """Refuses flags that do not go together."""
    if flags.stage is None:
        raise UsageError("no stage given", "--stage", "--stage 1, and --stage 2 when that is done")
    stage: SftStage | None = next((s for s in get_args(SftStage) if s == flags.stage), None)
    if stage is None:
        raise UsageError(f"no stage '{flags.stage}'", "--stage", nearest(flags.stage, get_args(SftStage)))
    if flags.from_ is not None and flags.from_scratch:
        raise UsageError("--from and --from-scratch exclude each other", "--from, --from-scratch", "keep one of them")
    check_ranks(flags.ranks)
    check_name(flags.name)
    return stage


def _named(
    typed: str | None, flag: str, written: str, project: ProjectFile | None, key: str, cwd: Path
) -> _Place | None:
    """What the flag names, else what the project file does; an empty flag is an InputError."""
    if typed is not None:
        if not typed.strip():  # as a path it would be the current folder
            raise InputError(f"{flag} is empty", flag, "name something, or leave it out")
        return _Place(typed, flag, cwd)
    return _Place(written, project.where(key), project.folder) if project and written else None


def _model(
    flags: SftFlags,
    project: ProjectFile | None,
    cwd: Path,
    runs: Path,
    stage: SftStage,
    download: bool,
    notes: list[str],
) -> tuple[str, Weights | None]:
    """The size and the weights to start from; None for random ones."""
    size = flags.size or (project.model.size if project else None)
    where = "--size" if flags.size or not project else project.where("model.size")
    if size is not None:
        load_preset(size)
    if flags.from_scratch:
        if size is None:
            raise UsageError("no model size given", "--size", f"add --size. Valid: {', '.join(SIZES)}.")
        return size, None
    section = project.sft.get(stage) if project else None
    given = _named(flags.from_, "--from", section.from_ if section else "", project, f"sft.{stage}.from", cwd)
    weights = None if given else _newest(runs, stage, size, notes)
    if weights is None:
        given = given or _fallback(project, stage, runs, cwd)
        weights = find_weights(given.text, given.base, runs, given.where, download)
    if size is None:
        size = weights.run.size if weights.run else matching_size(weights.shape)
        if size is None:
            raise InputError("the weights fit none of the sizes", str(weights.config), "infir2 presets list")
        notes.append(f"size {size}, read from {weights.config}")
    check_size(size, weights, where)
    return size, weights


def _newest(runs: Path, stage: SftStage, size: str | None, notes: list[str]) -> Weights | None:
    """What the stage before left: of continual pre-training as far as it is, of stage 1 only when it is finished."""
    before = {"1": "cpt", "2": "sft-1"}[stage]
    found = newest_run(runs, before, size)
    if stage == "1" and (decayed := newest_run(runs, "cpt-decay", size)) is not None:
        pair = [weights for weights in (found, decayed) if weights is not None]
        found = max(pair, key=lambda weights: (weights.path / "manifest.json").stat().st_mtime)
    if found is None or found.run is None:
        return None
    total = found.run.train.steps
    if stage == "2" and found.step < total:
        what = f"stage 1 is not finished: {found.run.name} is at step {found.step} of {total}"
        hint = f"type its command again, or --from {found.run.name} to start from there all the same"
        raise InputError(what, str(found.path), hint)
    notes.append(f"starts from {found.run.name}, step {found.step} of {total}: the newest run of {found.run.title}")
    return found


def _fallback(project: ProjectFile | None, stage: SftStage, runs: Path, cwd: Path) -> _Place:
    """The project's own model, which stage 1 may begin with when nothing was pre-trained."""
    if stage == "1" and project and project.model.from_:
        return _Place(project.model.from_, project.where("model.from"), project.folder)
    if stage == "2":
        hint = "run stage 1, or name weights with --from"
        raise InputError("there is no run of stage 1 to start from", str(runs), hint)
    hint = "--from HF_DIR or --from RUN; --from-scratch starts from random weights"
    raise InputError("nothing to fine-tune: no run of continual pre-training is here", str(runs), hint)


def _tokenizer(
    flags: SftFlags,
    project: ProjectFile | None,
    cwd: Path,
    stage: SftStage,
    weights: Weights | None,
    model: ModelShape,
) -> _Place:
    """The tokenizer that was named, else that of the weights."""
    section = project.sft.get(stage) if project else None
    written = section.tokenizer if section else ""
    given = _named(flags.tokenizer, "--tokenizer", written, project, f"sft.{stage}.tokenizer", cwd)
    if given is not None:
        here = given.base / Path(given.text).expanduser()
        return _Place(str(absolute(given.text, given.base)) if here.is_dir() else given.text, given.where, given.base)
    found = ""
    if weights is None:
        found = BYTE if model.vocab == load_preset("tiny").model.vocab else ""
    elif weights.kind == "hf":
        found = str(weights.path)
    elif weights.run is not None:
        found = weights.run.tokenizer or (weights.run.source.path if weights.run.source.kind == "hf" else "")
    if not found:
        what = "nothing says which tokenizer belongs to the weights"
        raise InputError(what, str(weights.path) if weights else "--from-scratch", "--tokenizer HF_DIR, or byte")
    return _Place(found, f"tokenizer of {weights.path}" if weights else "--from-scratch", cwd)
