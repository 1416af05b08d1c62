"""Presets against transformers' own model and the published figures of upstream."""

from __future__ import annotations

import subprocess
import sys

import pytest

from infir2_core.config import toml
from infir2_core.config.hf_config import shape_to_hf
from infir2_core.config.presets import FOLDER, list_presets, load_preset
from infir2_core.config.schema import SIZES, Blend, RunConfig, Source
from infir2_core.errors import InputError
from infir2_core.launch.plan import MARGIN, excess_bytes, make_plan, what_fits
from infir2_core.precision.recipe import load_recipe

PUBLISHED = {"0.5b": 0.49, "1.5b": 1.54, "3b": 3.09, "7b": 7.62}  # billions, from the Qwen2.5 model cards
UPSTREAM = {
    "recipe": "infir2",
    "steps": 40000,
    "seq_len": 32768,
    "global_batch": 128,
    "micro_batch": 1,
    "schedule": "wsd",
    "lr": 1e-4,
    "min_lr": 1e-5,
    "warmup_steps": 5000,
    "decay_steps": 5000,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "clip": 1.0,
    "seed": 1236,
    "init_std": 0.008,
    "split": "90,5,5",
    "eval_every": 100,
    "eval_iters": 10,
    "save_every": 1000,
    "keep_last": 2,
    "keep_every": 5000,
    "recompute": "none",
    "max_skips": 10,
}


def test_every_size_has_a_preset_and_every_file_is_a_size() -> None:
    assert [preset.size for preset in list_presets()] == list(SIZES)
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_those_of_transformers(size: str) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = load_preset(size).model
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**shape_to_hf(shape)))
    assert sum(p.numel() for p in model.parameters()) == shape.parameters


@pytest.mark.parametrize(("size", "billions"), PUBLISHED.items())
def test_parameters_are_those_of_the_model_cards(size: str, billions: float) -> None:
    assert round(load_preset(size).model.parameters / 1e9, 2) == billions


@pytest.mark.parametrize("size", PUBLISHED)
def test_large_sizes_carry_the_upstream_settings(size: str) -> None:
    preset = load_preset(size)
    assert preset.cpt.model_dump() == UPSTREAM
    assert f"{preset.tokens / 1e9:.1f}" == "167.8"


def test_small_sizes_train_the_byte_tokenizer_within_their_positions() -> None:
    for size, millions in (("tiny", 2.4), ("small", 19.9)):
        preset = load_preset(size)
        assert preset.model.vocab == 260 and preset.model.tied
        assert preset.cpt.seq_len <= preset.model.max_positions
        assert round(preset.model.parameters / 1e6, 1) == millions


def test_files_spell_every_setting_out() -> None:
    for size in SIZES:
        content = toml.parse((FOLDER / f"{size}.toml").read_text(encoding="utf-8"), size)
        assert set(content["cpt"]) == set(UPSTREAM)
        assert set(content["model"]) == set(load_preset(size).model.model_dump())


def test_a_misspelt_size_names_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        load_preset("15b")
    assert caught.value.exit_code == 3
    assert "'15b'" in caught.value.what and "Did you mean '1.5b'?" in caught.value.hint


def test_the_config_package_imports_no_torch() -> None:
    modules = "hf_config layers mixture presets project resolve resolve_sft rl runfile schema source toml".split()
    code = "import sys\n" + "".join(f"import infir2_core.config.{name}\n" for name in modules)
    code += "assert not {'torch', 'transformers', 'megatron', 'numpy'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "size,recipe,seq_len,rows,measured",
    [
        ("1.5b", "bf16", 8192, 2, 49.6),
        ("1.5b", "infir2", 8192, 2, 47.8),
        ("1.5b", "infir2", 32768, 1, 71.9),
        ("1.5b", "infir2-lean", 8192, 2, 30.0),
        ("7b", "infir2-lean", 32768, 1, 121.6),
    ],
)
def test_the_planned_memory_is_what_an_h200_measured(
    size: str, recipe: str, seq_len: int, rows: int, measured: float
) -> None:
    """GiB of benchmarks/LOG.md; never less, or a plan would pass that does not fit, and at most `MARGIN` more."""
    planned = make_plan(planned_run(size, recipe, seq_len, rows), load_recipe(recipe)).memory_bytes / 2**30
    assert 0.995 * measured <= planned <= MARGIN * measured


def planned_run(size: str, recipe: str, seq_len: int, rows: int) -> RunConfig:
    preset = load_preset(size)
    changes = {"recipe": recipe, "seq_len": seq_len, "micro_batch": rows, "global_batch": rows}
    return RunConfig(
        name="plan",
        runs="-",
        size=size,
        model=preset.model,
        source=Source(kind="scratch"),
        data=[Blend(prefix="-", weight=1.0, content="")],
        cpt=preset.cpt.model_copy(update=changes),
        ranks=1,
    )


def test_what_exceeds_a_card_and_what_would_not() -> None:
    h200 = 140 << 30
    config, recipe = planned_run("7b", "infir2", 32768, 2), load_recipe("infir2")
    assert excess_bytes(config, recipe, h200) > 50 << 30
    fits = what_fits(config, recipe, h200)
    assert "--recipe infir2-lean --recompute full" in fits and "--micro-batch 1" not in fits
    assert excess_bytes(planned_run("7b", "infir2-lean", 32768, 1), load_recipe("infir2-lean"), h200) == 0
    assert excess_bytes(planned_run("1.5b", "infir2", 8192, 2), recipe, h200) == 0
