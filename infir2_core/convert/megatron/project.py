"""Arguments of Megatron-LM or slime as a project file of ours, with a list of everything that is not carried over.

Only what differs from the preset of the size is written, so that a project file says what is special about a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from pydantic import ValidationError

from ...config.presets import list_presets, load_preset
from ...config.rl import RlSettings, RlStage
from ...config.schema import ALIGNMENT, SftStage
from ...config.toml import problems
from ...errors import InputError
from .arguments import PADDING
from .carried import (
    CARRIED,
    CARRIED_RL,
    CARRIED_SFT,
    DEFAULTS,
    DEFAULTS_RL,
    IMPLIED,
    IMPLIED_RL,
    LAYOUT,
    SAME_RL,
    SHAPE,
    SWITCHES_RL,
    WORDS_RL,
)
from .dist import DistCheckpoint, find_iteration
from .scripts import Script, read_script
from .shell import UNREAD

SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"  # environment variable of TransformerEngine


@dataclass
class Imported:
    """A project file's content: `size`, `source` ([model] from), data, and settings that differ from the preset.

    Settings are those of [cpt], or of [sft.N] or [rl.N] by number. `left` maps every argument that was not carried over
    to the reason; `notes` is for the user.
    """

    origin: str
    stage: str
    size: str = ""
    source: str = ""
    cpt: dict[str, Any] = field(default_factory=dict)
    sft: dict[str, dict[str, Any]] = field(default_factory=dict)
    rl: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def from_script(path: Path) -> Imported:
    """The project that a launch script describes; the script is not run.

    Raises:
        InputError: the script cannot be read, or its model is none of the sizes.
    """
    script = read_script(path)
    values: dict[str, Any] = {name: _value(words) for name, words in script.flags.items()}
    if "fp8_format" in values:
        values["fp8"] = values.pop("fp8_format")
    stage = "cpt"
    if script.program != "pretrain_gpt.py":
        stage = "sft" if "sft_loss" in str(values.get("loss_type", "")) else "rl"
    for name in script.sourced:
        if not Path(name).is_file():
            size = next((p.size for p in list_presets() if f"qwen2.5-{p.size}.sh" == Path(name).name.lower()), "")
            values.setdefault("_size", size)
    scales = {launch.variables.get(SCALES) == "1" for launch in script.launches}
    given = set(values)
    defaults = {"cpt": DEFAULTS, "rl": DEFAULTS_RL}.get(stage, {})
    values = {name: _value([text]) for name, text in defaults.items()} | values
    unread = _unread(script)
    if len(scales) > 1:
        unread["fp8"] = f"the launches differ in {SCALES}"
    values = {name: value for name, value in values.items() if name not in unread}
    imported = _import(values, str(path), stage, True in scales, given - set(unread), unread, script.conditional)
    places = ", ".join(launch.where for launch in script.launches)
    if len(script.launches) > 1:
        imported.notes.append(f"{script.program} is started at {places}: what these agree in is taken")
    elif script.launches[0].conditional:
        imported.notes.append(f"whether {script.program} is started at {places} depends on a condition or a loop")
    if script.conditional:
        listed = ", ".join(script.conditional)
        imported.notes.append(f"not carried over, as they depend on a condition or a loop: {listed}")
    missing = [name for name in script.sourced if not Path(name).is_file()]
    imported.notes += [f"{name}, which the script reads in, is not there" for name in missing]
    if any(launch.garbled for launch in script.launches):
        imported.notes.append("--runtime-env-json is no JSON as the script has it: the environment in it is not read")
    return imported


def _unread(script: Script) -> dict[str, str]:
    """Flags whose values a script leaves open, with the reason."""
    found = {
        name: f"its value is known only when the script runs ({' '.join(values)})"
        for name, values in script.flags.items()
        if any(map(UNREAD.search, values))
    }
    for name, choices in script.differing.items():
        shown = (("absent" if values is None else " ".join(values) or "given") for values in choices)
        found[name] = f"the launches differ in it ({'; '.join(dict.fromkeys(shown))})"
    return {{"fp8_format": "fp8"}.get(name, name): reason for name, reason in found.items()}


def from_checkpoint(folder: Path) -> Imported:
    """The project that the arguments inside a torch_dist checkpoint describe; it starts from that checkpoint's export.

    Raises:
        InputError: no such checkpoint, it keeps no arguments, or its model is none of the sizes.
    """
    path = find_iteration(folder, "--from-megatron")
    checkpoint = DistCheckpoint(path)
    checkpoint.close()
    values = {name: value for name, value in checkpoint.arguments.items() if value is not None}
    if not values:
        raise InputError("the checkpoint keeps no arguments", str(path), "infir2 init --from-script SCRIPT")
    imported = _import(values, str(path), "cpt", False, set(values))
    imported.source = ""
    imported.notes.append(f"to start from its weights: infir2 convert to-hf {folder} HF_DIR, then from = 'HF_DIR'")
    return imported


def _value(words: list[str]) -> Any:
    """A flag's value as a number, a text, a list, or True for a flag without one."""
    if not words:
        return True
    if len(words) > 1:
        return words
    for kind in (int, float):
        try:
            return kind(words[0])
        except ValueError:
            continue
    return words[0]


def _import(
    values: dict[str, Any],
    origin: str,
    stage: str,
    fp32: bool,
    given: set[str],
    unread: Mapping[str, str] = MappingProxyType({}),
    conditional: Sequence[str] = (),
) -> Imported:
    found = Imported(origin, stage, left=dict(unread))
    found.size = values.pop("_size", "") or _size(values, origin, conditional)
    preset = load_preset(found.size)
    taken = set(SHAPE) | {"_size"}
    taken |= {name for name, allowed in IMPLIED.items() if name in values and values[name] in allowed}
    expected = {"norm_epsilon": preset.model.norm_eps, "rotary_base": preset.model.rope_base}
    expected["untie_embeddings_and_output_weights"] = not preset.model.tied
    expected["kv_channels"] = preset.model.head_dim
    taken |= {name for name, value in expected.items() if name in values and values[name] == value}
    taken |= (
        {"max_position_embeddings"} if values.get("max_position_embeddings") == preset.model.max_positions else set()
    )
    for name in ("vocab_size", "padded_vocab_size"):
        if isinstance(values.get(name), int) and 0 <= values[name] - preset.model.vocab < PADDING:
            taken.add(name)  # padding is Megatron's; the vocabulary is the model's
    if stage == "cpt":
        taken |= _cpt(values, found, fp32)
    elif stage == "sft":
        taken |= _sft(values, found, fp32)
    else:
        taken |= _rl(values, found, fp32, given)
    _refuse_wrong(found)
    if isinstance(values.get("hf_checkpoint"), str):
        found.source = values["hf_checkpoint"]
        taken.add("hf_checkpoint")
    for name in sorted(given - taken):
        found.left[name] = _reason(name, values[name], stage)
    return found


def _refuse_wrong(found: Imported) -> None:
    """InputError for values that the project file would be refused for, with the flags that gave them."""
    preset = load_preset(found.size)
    stages: list[tuple[Any, dict[str, Any], dict[str, str]]] = [(preset.cpt, found.cpt, CARRIED)]
    stages += [(preset.sft[cast(SftStage, number)], own, CARRIED_SFT) for number, own in found.sft.items()]
    wrong: dict[str, str] = {}
    for base, own, carried in stages:
        flags = {ours: f"--{theirs.replace('_', '-')}" for theirs, ours in carried.items()}
        try:
            type(base).model_validate(base.model_dump() | {name: own[name] for name in own if name != "data"})
        except ValidationError as error:
            told = problems(error, type(base))
            wrong |= {flags[str(key[0])]: text for key, text in told if key and key[0] in own and key[0] in flags}
    if any(part["weight"] <= 0 for part in found.data.values()):
        wrong["--data-path"] = "weights of data must be greater than 0"
    if wrong:
        hint = "correct the flag in a copy of the script"
        raise InputError("; ".join(wrong.values()), f"{found.origin}: {', '.join(wrong)}", hint)


def _size(values: dict[str, Any], origin: str, conditional: Sequence[str]) -> str:
    shape = {ours: values[theirs] for theirs, ours in SHAPE.items() if theirs in values}
    if len(shape) < 3:
        hint = "infir2 init --size SIZE writes a project file to fill in"
        if place := next((text.split("=")[0] for text in conditional if "--hidden-size" in text), ""):
            hint = f"assign {place} without a condition in a copy of the script, or: {hint}"
        raise InputError("nothing says which model this trains (num-layers, hidden-size ...)", origin, hint)
    for preset in list_presets():
        if all(getattr(preset.model, name) == value for name, value in shape.items()):
            return preset.size
    listed = ", ".join(f"{name} {value}" for name, value in shape.items())
    raise InputError(f"the model fits none of the sizes: {listed}", origin, "infir2 presets list")


def _cpt(values: dict[str, Any], found: Imported, fp32: bool) -> set[str]:
    """Fills [cpt] and the data; returns the arguments that are accounted for."""
    preset = load_preset(found.size).cpt.model_dump()
    decay = values.get("override_opt_param_scheduler") is True and values.get("lr_warmup_iters") == 0
    settings, taken = _settings(values, found, preset, CARRIED, ("wsd", "cosine", "constant"), fp32)
    if decay:
        taken.add("override_opt_param_scheduler")
        settings.pop("warmup_steps", None)
        found.notes.append("a decay phase: infir2 cpt --phase decay --load RUN/checkpoints/step-N")
    found.cpt = {name: value for name, value in settings.items() if value != preset[name]}
    return taken | _data(values, found)


def _sft(values: dict[str, Any], found: Imported, fp32: bool) -> set[str]:
    """Fills [sft.1], or [sft.2] when the script's name says so; returns the arguments that are accounted for."""
    number: SftStage = _number(found.origin)
    preset = load_preset(found.size).sft[number].model_dump()
    settings, taken = _settings(values, found, preset, CARRIED_SFT, ("cosine", "constant"), fp32)
    settings["max_tokens"] = min(preset["max_tokens"], settings.get("row_tokens", preset["row_tokens"]))
    own = {name: value for name, value in settings.items() if value != preset[name]}
    if isinstance(values.get("prompt_data"), str):
        own["data"] = values["prompt_data"]
        taken.add("prompt_data")
    found.sft = {number: own}
    taken |= {name for name in ("use_dynamic_batch_size", "apply_chat_template") if values.get(name) is True}
    taken |= {name for name, told in (("loss_type", "sft_loss"), ("input_key", "messages")) if values.get(name) == told}
    if values.get("rollout_batch_size") == values.get("global_batch_size"):
        taken.add("rollout_batch_size")
    return taken


def _rl(values: dict[str, Any], found: Imported, fp32: bool, given: set[str]) -> set[str]:
    """Fills [rl.1] or [rl.2], as `_sft` does; returns the arguments that are accounted for."""
    number: RlStage = _number(found.origin)
    preset = load_preset(found.size).rl[number].model_dump()
    silent = {name for name in SAME_RL if name not in given and name not in found.left}
    values = values | {name: values[SAME_RL[name]] for name in silent if SAME_RL[name] in values}
    settings, taken = _settings(values, found, preset, CARRIED_RL, ("cosine", "constant"), fp32)
    for theirs, ours in WORDS_RL.items():
        if values.get(theirs) in get_args(RlSettings.model_fields[ours].annotation):
            settings[ours] = values[theirs]
            taken.add(theirs)
    for theirs, (ours, word, present, absent) in SWITCHES_RL.items():
        value = values.get(theirs)
        if value is None and theirs not in found.left:
            settings[ours] = absent
        elif value is True if word is None else str(value).rpartition(".")[2] == word:
            settings[ours] = present
            taken.add(theirs)
    if values.get("use_kl_loss") is True:
        taken.add("use_kl_loss")
    elif settings.pop("kl_coef", 0):
        settings["kl_coef"] = 0.0
        found.left["kl_loss_coef"] = f"without --use-kl-loss slime takes no such loss ({values['kl_loss_coef']})"
    if values.get("max_response_length") == values.get("rollout_max_response_len"):
        taken.add("max_response_length")
    taken |= {name for name, allowed in IMPLIED_RL.items() if name in values and values[name] in allowed}
    _fit_rows(settings, preset, found)
    own = {name: value for name, value in settings.items() if value != preset[name]}
    for key, told in _wrong(preset | own):
        if key:
            found.notes.append(f"{told}; the preset's {preset[key]} is kept")
            own.pop(key)
    found.notes += [f"change [rl.{number}] before use: {told}" for _, told in _wrong(preset | own)]
    if isinstance(values.get("prompt_data"), str):
        own["data"] = values["prompt_data"]
        taken.add("prompt_data")
    words = values.get("eval_prompt_data")
    if isinstance(words, list) and len(words) % 2 == 0 and len(set(words[::2])) == len(words) // 2:
        own["eval_data"] = dict(zip(words[::2], words[1::2], strict=True))
        taken.add("eval_prompt_data")
    found.rl = {number: own}
    return taken


def _wrong(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """(setting, sentence) of what is wrong; no setting where several contradict each other."""
    try:
        RlSettings.model_validate(settings, strict=True)
    except ValidationError as error:
        return [(str(key[0]) if key else "", told) for key, told in problems(error, RlSettings)]
    return []


def _fit_rows(settings: dict[str, Any], preset: dict[str, Any], found: Imported) -> None:
    """slime runs an answer that exceeds its tokens a GPU alone; a row of ours holds every prompt and answer."""
    merged = preset | settings
    longest = merged["max_prompt_tokens"] + merged["max_response_tokens"]
    rows = -(-max(merged["row_tokens"], longest) // ALIGNMENT) * ALIGNMENT
    if rows != merged["row_tokens"]:
        settings["row_tokens"] = rows
        found.notes.append(f"row_tokens is {rows}: a multiple of {ALIGNMENT} that holds a prompt and its answer")


def _number(origin: str) -> Literal["1", "2"]:
    """The stage that the name of a script says it is; the earlier one unless it says 2."""
    return "2" if re.search(r"stage[-_ ]?2", Path(origin).name, re.IGNORECASE) else "1"


def _settings(
    values: dict[str, Any],
    found: Imported,
    preset: dict[str, Any],
    carried: dict[str, str],
    schedules: tuple[str, ...],
    fp32: bool,
) -> tuple[dict[str, Any], set[str]]:
    """What stages have in common: our settings, and the arguments they come from."""
    settings: dict[str, Any] = {}
    taken = set()
    for theirs, ours in carried.items():
        value = values.get(theirs)
        made = None if value is None else _as(type(preset[ours]), value)
        if made is not None:
            taken.add(theirs)
            settings[ours] = made
    across = values.get("context_parallel_size")
    if "row_tokens" in settings and isinstance(across, int) and across > 1:
        settings["row_tokens"] *= across
        found.notes.append(f"row_tokens is that of {across} GPUs, over which context parallelism spreads a row")
    style = str(values.get("lr_decay_style", "")).lower()
    if style in schedules:
        settings["schedule"] = style
        taken.add("lr_decay_style")
    if values.get("recompute_granularity") in ("full", "selective"):
        settings["recompute"] = values["recompute_granularity"]
        taken.add("recompute_granularity")
    if not values.get("fp8") and "fp8" not in found.left:
        settings["recipe"] = "bf16"
    elif values.get("fp8") == "e4m3" and values.get("fp8_recipe") == "blockwise":
        settings["recipe"] = "infir2-fp32-scales" if fp32 else "infir2"
        taken |= {"fp8", "fp8_recipe"}
    return settings, taken


def _as(kind: type, value: Any) -> Any:
    """`value` as a setting of this kind; None when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        return None
    if isinstance(value, float) and (not math.isfinite(value) or (kind is int and number != value)):
        return None
    return number


def _data(values: dict[str, Any], found: Imported) -> set[str]:
    """[data.NAME] of each prefix: `--data-path PREFIX`, or weights and prefixes by turns."""
    words = values.get("data_path")
    if not words or words is True:
        return set()
    words = [str(word) for word in (words if isinstance(words, list) else [words])]
    pairs = [("1", words[0])] if len(words) == 1 else list(zip(words[::2], words[1::2], strict=False))
    for number, (weight, prefix) in enumerate(pairs, 1):
        try:
            found.data[f"part{number}"] = {"prefixes": prefix, "weight": float(weight)}
        except ValueError:
            return set()
    return {"data_path"}


def _reason(name: str, value: Any, stage: str) -> str:
    shown = "" if value is True else f" {' '.join(map(str, value)) if isinstance(value, list) else value}"
    if name in {"cpt": CARRIED, "sft": CARRIED_SFT, "rl": CARRIED_RL}[stage]:
        return f"its value is no number that can be taken{shown and ' (' + shown.strip() + ')'}"
    implied = IMPLIED | IMPLIED_RL if stage == "rl" else IMPLIED
    if name in implied:
        return f"infir2 computes {name} = {implied[name][0]}, not{shown or ' this'}"
    if stage == "rl" and name in WORDS_RL:
        known = ", ".join(get_args(RlSettings.model_fields[WORDS_RL[name]].annotation))
        return f"infir2 knows {known}, not{shown or ' this'}"
    if "parallel" in name or name in LAYOUT:
        return f"how it is spread over GPUs is no setting of the project{shown and ' (' + shown.strip() + ')'}"
    if stage != "cpt" and name == "ref_load":
        return f"the weights training starts from: infir2 convert to-hf{shown} HF_DIR, then from = 'HF_DIR'"
    return f"no setting of infir2{shown and ' (' + shown.strip() + ')'}"
