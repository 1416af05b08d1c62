"""Presets, project file and flags of fine-tuning become one run; where weights, tokenizer and data come from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from infir2_core.config.hf_config import shape_to_hf
from infir2_core.config.layers import Resolved
from infir2_core.config.presets import FOLDER, load_preset
from infir2_core.config.project import FILE, SftSection, load_project
from infir2_core.config.resolve_sft import CACHE, Measured, SftFlags, Wanted, resolve_sft
from infir2_core.config.runfile import differences, read_config, write_config
from infir2_core.config.schema import SIZES, ChatData, ModelShape, RunConfig, SftSettings
from infir2_core.config.toml import parse
from infir2_core.errors import Infir2Error, InputError, UsageError
from infir2_core.launch.plan import excess_bytes, make_plan, what_fits
from infir2_core.optim.schedule import decay_done, learning_rate
from infir2_core.precision.recipe import load_recipe

# The scripts of InfiR2's release: both stages the same, the learning rate by size.
UPSTREAM = {
    "recipe": "infir2",
    "epochs": 5,
    "global_batch": 64,
    "row_tokens": 32768,
    "max_tokens": 32768,
    "schedule": "cosine",
    "warmup_share": 0.05,
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.95,
    "save_every": 1000,
}
RATES = {"7b": (2e-5, 2e-6), "1.5b": (5e-5, 5e-6)}
CHAT = ChatData(samples=1000, held_out=5, tokens=300_000, trained_tokens=200_000, context=400.0, turn_end=258)


def measured(wanted: Wanted) -> Measured:
    return Measured(CHAT, f"digest of {wanted.data.name}", wanted.tokenizer, ["said"])


def resolve(here: Path, project: str | None = None, stage: str = "1", **flags: Any) -> Resolved:
    names = set(SftSettings.model_fields)
    settings = {name: value for name, value in flags.items() if name in names}
    rest = {"data": "chats.jsonl"} | {name: value for name, value in flags.items() if name not in names}
    loaded = None
    if project is not None:
        (here / FILE).write_text("format = 1\n" + project)
        loaded = load_project(here / FILE)
    return resolve_sft(SftFlags(stage=stage, **rest, settings=settings), loaded, here, measured)


def scratch(here: Path, **flags: Any) -> RunConfig:
    return resolve(here, **{"size": "tiny", "from_scratch": True} | flags).config


def refused(kind: type[Infir2Error], here: Path, *words: str, **flags: Any) -> None:
    with pytest.raises(kind) as caught:
        resolve(here, **flags)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value), str(caught.value)


def run_folder(config: RunConfig, *steps: int, at: float = 0.0, tokenizer: str = "byte") -> Path:
    """The folder of a run with checkpoints as far as finding them goes, written at time `at`."""
    run = Path(config.runs) / config.name
    write_config(config.model_copy(update={"tokenizer": tokenizer}), run / "config.toml")
    for step in steps:
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        content = {"step": step, "state": {"engine": {"model": config.model.model_dump()}}}
        (folder / "manifest.json").write_text(json.dumps(content))
        os.utime(folder / "manifest.json", (at, at))
    return run


def cpt_run(here: Path, name: str, at: float, *steps: int, size: str = "tiny", phase: str = "full") -> Path:
    preset = load_preset(size)
    config = RunConfig(
        name=name, runs=str(here / "runs"), size=size, model=preset.model, source={"kind": "scratch"}, phase=phase,
        data=[{"prefix": "x", "weight": 1.0}], cpt=preset.cpt,
    )  # fmt: skip
    return run_folder(config, *steps, at=at)


# Presets


@pytest.mark.parametrize("size", RATES)
@pytest.mark.parametrize("stage", ["1", "2"])
def test_published_sizes_carry_the_upstream_settings(size: str, stage: str) -> None:
    sft = load_preset(size).sft[stage]
    assert {name: getattr(sft, name) for name in UPSTREAM} == UPSTREAM
    assert (sft.lr, sft.min_lr) == RATES[size]


def test_files_spell_every_setting_of_both_stages_out() -> None:
    for size in SIZES:
        content = parse((FOLDER / f"{size}.toml").read_text(encoding="utf-8"), size)
        assert {stage: set(table) for stage, table in content["sft"].items()} == dict.fromkeys(
            ("1", "2"), set(SftSettings.model_fields)
        )
        assert all(sft.max_tokens <= load_preset(size).model.max_positions for sft in load_preset(size).sft.values())


def test_the_schedule_of_a_whole_run_is_upstreams(tmp_path: Path) -> None:
    """72,000 samples, 5 epochs, batches of 64: 5,625 steps, of which 281 warm up."""
    sft = load_preset("7b").sft["1"].model_copy(update={"steps": -(-5 * 72_000 // 64)})
    assert (sft.steps, sft.warmup_steps) == (5625, 281)
    rates = [learning_rate(sft, done) for done in range(sft.steps + 1)]
    assert rates[0] == 0 and max(rates) == rates[281] == 2e-5 and rates[-1] == pytest.approx(2e-6)
    assert rates[281 + (5625 - 281) // 2] == pytest.approx((2e-5 + 2e-6) / 2)
    assert decay_done(sft, 5625) and not decay_done(sft, 5624)


# Layers and length


OTHER: dict[str, tuple[Any, Any]] = {
    "recipe": ("bf16", "fp32"),
    "steps": (20, 25),
    "row_tokens": (8192, 2048),
    "max_tokens": (512, 300),
    "too_long": ("truncate", "truncate"),
    "schedule": ("constant", "constant"),
    "recompute": ("full", "selective"),
    "max_bad_share": (0.5, 0.2),
    "prompts": (["a"], ["b", "c"]),
    "weight_decay": (0.5, 0.25),
}


@pytest.mark.parametrize("name", SftSettings.model_fields)
def test_flags_win_over_the_project_and_the_project_over_the_preset(tmp_path: Path, name: str) -> None:
    before = getattr(load_preset("tiny").sft["2"], name)
    low, high = OTHER.get(name) or ((before + 1, before + 2) if isinstance(before, int) else (before / 2, before / 4))
    text = f'[model]\nsize = "tiny"\n[sft.1]\nseed = 99\n[sft.2]\n{name} = {json.dumps(low)}'
    flags = {"from_scratch": True, "stage": "2"}
    assert getattr(resolve(tmp_path, text, **flags).config.train, name) == low
    assert getattr(resolve(tmp_path, text, **flags, **{name: high}).config.train, name) == high
    made = resolve(tmp_path, size="tiny", **flags, **{name: high}).config
    assert getattr(made.train, name) == high and made.title == "sft-2"


def test_the_length_follows_from_epochs_and_samples(tmp_path: Path) -> None:
    config = scratch(tmp_path)
    assert config.sft and config.sft.steps == 125 and config.sft.warmup_steps == 6, "2 x 1000 samples by 16"
    assert config.name.startswith("sft-1-tiny-infir2-")
    assert scratch(tmp_path, epochs=3, global_batch=7).train.steps == 429
    assert scratch(tmp_path, steps=10).train.steps == 10
    refused(
        InputError, tmp_path, "126 steps are more than 2 epochs", "--steps", size="tiny", from_scratch=True, steps=126
    )
    plan = make_plan(config, load_recipe("infir2"))
    assert plan.tokens == 600_000 and plan.tokens_per_step == 4800
    assert make_plan(scratch(tmp_path, steps=10), load_recipe("infir2")).tokens == 48_000


def test_a_run_is_found_again_and_survives_its_file(tmp_path: Path) -> None:
    config = scratch(tmp_path, prompts=["hello"])
    write_config(config, tmp_path / "config.toml")
    assert read_config(tmp_path / "config.toml") == config
    assert differences(config, config.model_copy(update={"tokenizer": "/elsewhere", "ranks": 2})) == []
    assert scratch(tmp_path, prompts=["hello"]).name == config.name != scratch(tmp_path, prompts=["bye"]).name
    assert scratch(tmp_path, prompts=["hello"], data="other.jsonl").name != config.name


def test_a_run_has_the_settings_of_its_own_stage_alone(tmp_path: Path) -> None:
    config = scratch(tmp_path)
    for change in ({"cpt": load_preset("tiny").cpt}, {"chat": None}, {"stage": "cpt"}):
        with pytest.raises(ValueError, match="settings of that stage and of no other"):
            RunConfig.model_validate(config.model_dump() | change)


def test_the_section_takes_every_setting_with_its_limits(tmp_path: Path) -> None:
    assert set(SftSection.model_fields) == set(SftSettings.model_fields) | {"data", "tokenizer", "from_"}
    for name in (name for name, field in SftSettings.model_fields.items() if field.metadata):
        with pytest.raises(InputError, match=rf"(?s)sft.1.{name} must be.*{FILE}:3"):
            resolve(tmp_path, f"[sft.1]\n{name} = -1")
    for text, words in (
        ("[sft.3]\nlr = 1e-5", "sft.3"),
        ("[sft.1]\nepoch = 2", "Did you mean 'epochs'?"),
        ('[sft.2]\nrecipe = "infir3"', "no recipe 'infir3'"),
    ):
        with pytest.raises(InputError, match=words):
            resolve(tmp_path, text)


@pytest.mark.parametrize(
    "words,flags",
    [
        (["row_tokens (1000) must be a multiple of 128", "--row-tokens"], {"row_tokens": 1000}),
        (["max_tokens (1024) is above row_tokens (512)"], {"row_tokens": 512}),
        (["min_lr (0.5) is above lr"], {"min_lr": 0.5}),
        (["max_tokens (4096) is above what the 2048 positions", "--max-tokens 2048"], {"max_tokens": 4096}),
        (["answer_tokens (2048) is above", "2048 positions", "--answer-tokens 2047"], {"answer_tokens": 2048}),
        (["too_long = 'cut' is not known"], {"too_long": "cut"}),
        (["schedule = 'wsd' is not known"], {"schedule": "wsd"}),
        (["no recipe 'infir3'", "--recipe"], {"recipe": "infir3"}),
        (["ranks must be at least 1"], {"ranks": 0}),
        (["cannot name a run folder"], {"name": "a/b"}),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, words: list[str], flags: dict[str, Any]) -> None:
    refused(InputError, tmp_path, *words, size="tiny", from_scratch=True, **flags)


def test_flags_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no stage given"):
        resolve_sft(SftFlags(), None, tmp_path, measured)
    refused(UsageError, tmp_path, "no stage '3'", stage="3")
    refused(UsageError, tmp_path, "exclude each other", size="tiny", from_scratch=True, from_="x")
    refused(UsageError, tmp_path, "no model size", from_scratch=True)
    refused(InputError, tmp_path, "no chat data given", "chat-demo", size="tiny", from_scratch=True, data=None)
    refused(InputError, tmp_path, "which tokenizer", "--tokenizer", size="0.5b", from_scratch=True)


# Where things come from


def test_stage_1_starts_from_the_newest_pre_training(tmp_path: Path) -> None:
    refused(InputError, tmp_path, "no run of continual pre-training", "--from", size="tiny")
    cpt_run(tmp_path, "old", 100, 100, 300)
    cpt_run(tmp_path, "large", 300, 300, size="small")
    cpt_run(tmp_path, "new", 200, 100)
    made = resolve(tmp_path, size="tiny")
    assert made.config.source.path == str(tmp_path / "runs/new/checkpoints/step-00000100")
    assert made.config.tokenizer == "byte" and made.config.source.optimizer is False
    assert any("starts from new, step 100 of 300" in note for note in made.notes) and "said" in made.notes
    assert resolve(tmp_path).config.size == "small", "without a size, the newest of any"
    decayed = cpt_run(tmp_path, "decayed", 250, 60, phase="decay")
    assert resolve(tmp_path, size="tiny").config.source.path.startswith(str(decayed))
    (tmp_path / "runs/new/config.toml").write_text("damaged")
    assert resolve(tmp_path, size="tiny", from_="old").config.source.path.endswith("old/checkpoints/step-00000300")


def test_stage_2_starts_from_the_end_of_stage_1(tmp_path: Path) -> None:
    cpt_run(tmp_path, "base", 500, 300)
    refused(InputError, tmp_path, "no run of stage 1", size="tiny", stage="2")
    first = scratch(tmp_path).model_copy(update={"name": "first"})
    run_folder(first, 100, at=100)
    refused(InputError, tmp_path, "stage 1 is not finished: first is at step 100 of 125", size="tiny", stage="2")
    run_folder(first, 125, at=110)
    made = resolve(tmp_path, size="tiny", stage="2")
    assert made.config.source.path == str(tmp_path / "runs/first/checkpoints/step-00000125")
    assert made.config.title == "sft-2" and any("starts from first, step 125 of 125" in note for note in made.notes)
    assert resolve(tmp_path, size="tiny", stage="2", from_="base").config.source.path.endswith("step-00000300")


def test_the_project_names_weights_data_and_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    (tmp_path / "below").mkdir()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(shape_to_hf(load_preset("tiny").model)))
    (tmp_path / "hf/model.safetensors").write_bytes(b"")
    text = """format = 1
[model]
size = "tiny"
from = "hf"
[sft.1]
data = "chats/one"
[sft.2]
data = "chats/two.jsonl"
tokenizer = "tok"
from = "hf"
"""
    (tmp_path / FILE).write_text(text)
    project = load_project(tmp_path / FILE)

    def of(**flags: Any) -> RunConfig:
        return resolve_sft(SftFlags(**flags), project, tmp_path / "below", measured).config

    one, two = of(stage="1"), of(stage="2")
    assert one.data[0].prefix == str(tmp_path / "chats/one") and two.data[0].prefix == str(tmp_path / "chats/two.jsonl")
    assert (one.source.kind, one.source.path, one.tokenizer) == ("hf", str(tmp_path / "hf"), str(tmp_path / "hf"))
    assert two.tokenizer == str(tmp_path / "tok")
    cpt_run(tmp_path, "trained", 100, 300)
    assert of(stage="1").source.path.endswith("trained/checkpoints/step-00000300"), "what was trained comes first"
    typed = of(stage="2", data="own.jsonl", tokenizer="byte", from_="../hf")
    assert typed.data[0].prefix == str(tmp_path / "below/own.jsonl") and typed.tokenizer == "byte"


def test_what_is_measured(tmp_path: Path) -> None:
    asked: list[Wanted] = []

    def watch(wanted: Wanted) -> Measured:
        asked.append(wanted)
        return measured(wanted)

    resolve_sft(SftFlags(stage="1", size="tiny", from_scratch=True, data="d"), None, tmp_path, watch)
    (wanted,) = asked
    assert wanted.data == tmp_path / "d" and wanted.cache == tmp_path / "runs" / CACHE
    assert wanted.model == load_preset("tiny").model and isinstance(wanted.model, ModelShape)
    assert wanted.settings == load_preset("tiny").sft["1"]


def test_memory_of_a_row_and_what_would_fit(tmp_path: Path) -> None:
    """A microbatch of 32,768 tokens takes what one of pre-training takes; its gradients are never shared with it."""
    flags = {"size": "1.5b", "from_scratch": True, "tokenizer": "t"}
    config, recipe = scratch(tmp_path, **flags), load_recipe("infir2")
    cpt = load_preset("1.5b").cpt.model_copy(update={"global_batch": 2})
    other = config.model_copy(update={"stage": "cpt", "sft": None, "chat": None, "cpt": cpt})
    assert make_plan(config, recipe).memory_bytes == make_plan(other, recipe).memory_bytes
    assert excess_bytes(config, recipe, 140 << 30) == 0
    tight = make_plan(config, recipe).memory_bytes // 2
    assert "--recompute full" in what_fits(config, recipe, tight)
    assert not any(option.startswith("--row-tokens") for option in what_fits(config, recipe, tight))
    short = scratch(tmp_path, **flags, max_tokens=8192)
    assert "--row-tokens 16384" in what_fits(short, recipe, round(make_plan(config, recipe).memory_bytes * 0.8))
