"""Presets and project sections of reinforcement learning: upstream's numbers, and every mistake named with its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infir2_core.config.presets import FOLDER, load_preset
from infir2_core.config.project import FILE, ProjectFile, RlSection, load_project
from infir2_core.config.rl import RlSettings
from infir2_core.config.schema import SIZES
from infir2_core.config.toml import parse
from infir2_core.errors import InputError
from infir2_core.optim.schedule import learning_rate
from infir2_core.precision.recipe import load_recipe

# The scripts of InfiR2's release for 7b. Rows: tokens a GPU times the two GPUs of context parallelism.
UPSTREAM = {
    "recipe": "infir2-fp32-scales",
    "steps": 10240,
    "rollout_prompts": 128,
    "samples_per_prompt": 16,
    "global_batch": 2048,
    "oversample_prompts": 384,
    "dynamic_filter": True,
    "sampler": "sglang",
    "sampler_memory": 0.5,
    "sampler_requests": 128,
    "reward": "deepscaler",
    "overlong_penalty": False,
    "overlong_buffer": 1024,
    "overlong_factor": 1.0,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "kl_coef": 0.0,
    "kl_estimator": "low_var_kl",
    "entropy_coef": 0.0,
    "tis": True,
    "schedule": "constant",
    "lr": 1e-6,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.98,
    "eval_every": 20,
    "eval_samples": 16,
    "eval_tokens": 30000,
    "eval_top_p": 0.7,
    "save_every": 20,
    "recompute": "full",
}
STAGES = {
    "1": {"max_response_tokens": 8192, "temperature": 1.0, "row_tokens": 2 * 8192},
    "2": {"max_response_tokens": 16384, "temperature": 1.1, "row_tokens": 2 * 16384},
}
# What slime and Megatron-LM do where those scripts give no flag.
SILENT = {"tis_cap": 2.0, "loss_mean": "sample", "eps": 1e-8, "clip": 1.0, "seed": 1234, "warmup_steps": 0}


def load(here: Path, text: str) -> ProjectFile:
    (here / FILE).write_text(f"format = 1\n{text}", encoding="utf-8")
    return load_project(here / FILE)


def refused(here: Path, text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        load(here, text)
    assert caught.value.exit_code == 3
    return caught.value


@pytest.mark.parametrize("size", ["0.5b", "1.5b", "3b", "7b"])
@pytest.mark.parametrize("stage", STAGES)
def test_large_sizes_carry_the_upstream_settings_of_7b(size: str, stage: str) -> None:
    settings = load_preset(size).rl[stage].model_dump()
    expected = UPSTREAM | STAGES[stage] | SILENT | {"eval_temperature": STAGES[stage]["temperature"]}
    assert {name: settings[name] for name in expected} == expected
    assert load_preset(size).rl == load_preset("7b").rl


def test_the_rate_is_constant_as_upstreams() -> None:
    settings = load_preset("7b").rl["1"]
    assert {learning_rate(settings, done) for done in (0, 1, 5000, 10240)} == {1e-6}


@pytest.mark.parametrize("size", SIZES)
def test_files_spell_every_setting_of_both_stages_out_and_fit_the_model(size: str) -> None:
    text = (FOLDER / f"{size}.toml").read_text(encoding="utf-8")
    assert {stage: set(table) for stage, table in parse(text, size)["rl"].items()} == dict.fromkeys(
        ("1", "2"), set(RlSettings.model_fields)
    )
    preset = load_preset(size)
    for rl in preset.rl.values():
        assert rl.max_prompt_tokens + max(rl.max_response_tokens, rl.eval_tokens) <= preset.model.max_positions
        assert load_recipe(rl.recipe).missing() == []


def test_a_comment_says_whose_settings_they_are() -> None:
    for size in SIZES:
        comment = (FOLDER / f"{size}.toml").read_text(encoding="utf-8").split("[rl.1]")[0].rpartition("\n\n")[2]
        assert comment.startswith("#") and "pstream" in comment


# The project file


def test_both_stages_in_a_project(tmp_path: Path) -> None:
    project = load(
        tmp_path,
        """model.size = "7b"
[rl.1]
data = "data/math.jsonl"
eval_data = {aime = "data/aime.jsonl", own = "data/own.jsonl"}
recipe = "bf16"
temperature = 1
[rl.2]
from = "runs/earlier"
tokenizer = "byte"
overlong_penalty = true
""",
    )
    one, two = project.rl["1"], project.rl["2"]
    assert one.settings() == {"recipe": "bf16", "temperature": 1.0} and one.data == "data/math.jsonl"
    assert one.eval_data == {"aime": "data/aime.jsonl", "own": "data/own.jsonl"}
    assert (two.from_, two.tokenizer, two.settings()) == ("runs/earlier", "byte", {"overlong_penalty": True})
    assert load(tmp_path, "").rl == {}


def test_the_section_takes_every_setting_with_its_limits(tmp_path: Path) -> None:
    assert set(RlSection.model_fields) == set(RlSettings.model_fields) | {"data", "eval_data", "tokenizer", "from_"}
    preset = load_preset("7b").rl["1"].model_dump()
    for name, value in preset.items():
        assert load(tmp_path, f"[rl.1]\n{name} = {json.dumps(value)}").rl["1"].settings() == {name: value}
    limited = [name for name, field in RlSettings.model_fields.items() if field.metadata]
    assert len(limited) > 30
    for name in limited:
        error = refused(tmp_path, f"[rl.1]\n{name} = -1")
        assert f"rl.1.{name} must be" in error.what and error.where.endswith(f"{FILE}:3")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[rl.1]\nclip_hihg = 0.3", 3, "unknown key 'rl.1.clip_hihg'. Did you mean 'clip_high'?"),
        ("[rl.2]\nsample_per_prompt = 8", 3, "Did you mean 'samples_per_prompt'?"),
        ("[rl.3]\nlr = 1e-6", 2, "rl.3"),
        ("[r1.1]\nlr = 1e-6", 2, "Did you mean 'rl'?"),
        ("[rl.1]\nreward = 'deepscale'", 3, "Did you mean 'deepscaler'?"),
        ("[rl.1]\nkl_estimator = 'k4'", 3, "Did you mean"),
        ("[rl.1]\nloss_mean = 'tokens'", 3, "Did you mean 'token'?"),
        ("[rl.1]\nsampler = 'vllm'", 3, "Valid: builtin, sglang."),
        ("[rl.1]\nschedule = 'wsd'", 3, "Valid: constant, cosine."),
        ("[rl.1]\ntis = 1", 3, "rl.1.tis must be true or false, not 1"),
        ("[rl.1]\ndynamic_filter = 'yes'", 3, "rl.1.dynamic_filter must be true or false"),
        ("[rl.1]\nsamples_per_prompt = 1", 3, "rl.1.samples_per_prompt must be at least 2, not 1"),
        ("[rl.1]\neval_data = 'aime.jsonl'", 3, "rl.1.eval_data must be a table"),
        ("[rl.1]\neval_data = {aime = 3}", 3, "rl.1.eval_data.aime must be text in quotes"),
        ("[rl.1]\nrecipe = 'infir3'", 3, "no recipe 'infir3'"),
        ("[rl.1]\ntemperature = 0", 3, "rl.1.temperature must be above 0"),
        ("[rl.1]\nsampler_memory = 1.0", 3, "rl.1.sampler_memory must be below 1"),
        ("[rl.1]\neval_top_p = 1.5", 3, "rl.1.eval_top_p"),
    ],
)
def test_each_mistake_is_told_with_line_and_key(tmp_path: Path, text: str, line: int, words: str) -> None:
    error = refused(tmp_path, text)
    assert f"{FILE}:{line}" in error.where and words in str(error), str(error)


@pytest.mark.parametrize(
    ("changes", "words", "keys"),
    [
        (
            {"global_batch": 1000},
            "rollout_prompts (128) times samples_per_prompt (16) must be a multiple of global_batch (1000)",
            ["global_batch", "rollout_prompts", "samples_per_prompt"],
        ),
        ({"oversample_prompts": 64}, "oversample_prompts (64) is below rollout_prompts (128)", ["oversample_prompts"]),
        ({"row_tokens": 16400}, "row_tokens (16400) must be a multiple of 128", ["row_tokens"]),
        (
            {"max_response_tokens": 15000},
            "max_prompt_tokens (2048) and max_response_tokens (15000) together exceed row_tokens (16384)",
            ["row_tokens", "max_prompt_tokens", "max_response_tokens"],
        ),
        (
            {"overlong_penalty": True, "overlong_buffer": 9000},
            "overlong_buffer (9000) is above max_response_tokens (8192)",
            ["overlong_buffer", "max_response_tokens"],
        ),
        ({"warmup_steps": 20000}, "warmup_steps (20000) is above steps (10240)", ["warmup_steps", "steps"]),
        ({"min_lr": 1e-3}, "min_lr (0.001) is above lr (1e-06)", ["min_lr", "lr"]),
    ],
)
def test_settings_that_contradict_each_other(
    tmp_path: Path, changes: dict[str, Any], words: str, keys: list[str]
) -> None:
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in changes.items())
    error = refused(tmp_path, f'model.size = "7b"\n[rl.1]\n{text}')
    assert error.what == words
    assert f"rl.1.{list(changes)[-1]}" in error.where and f"{FILE}:{3 + len(changes)}" in error.where
    assert error.hint.startswith("change rl.1.") and all(f"rl.1.{key}" in error.hint for key in keys)
    with pytest.raises(ValidationError):
        RlSettings.model_validate(load_preset("7b").rl["1"].model_dump() | changes)


def test_the_buffer_counts_only_with_the_penalty_and_bounds_are_allowed(tmp_path: Path) -> None:
    load(tmp_path, 'model.size = "7b"\n[rl.1]\noverlong_buffer = 9000')
    load(tmp_path, 'model.size = "7b"\n[rl.1]\nmax_response_tokens = 14336\noversample_prompts = 128')
    load(tmp_path, 'model.size = "7b"\n[rl.1]\nglobal_batch = 512\nwarmup_steps = 10240')


def test_the_size_decides_what_fits(tmp_path: Path) -> None:
    load(tmp_path, 'model.size = "7b"\n[rl.1]\nmax_response_tokens = 8000')
    error = refused(tmp_path, 'model.size = "tiny"\n[rl.1]\nmax_response_tokens = 8000')
    assert "row_tokens (4096)" in error.what and "preset tiny" in error.where


def test_commands_that_read_the_project_tell_it(tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / FILE).write_text('format = 1\nmodel.size = "7b"\n[rl.2]\nglobal_batch = 999\n')
    done = run_cli("cpt", "--dry-run", cwd=tmp_path)
    assert done.returncode == 3 and f"{FILE}:4: rl.2.global_batch" in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr
