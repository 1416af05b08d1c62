"""The oracle of the served model is a Qwen2: nearer to our FP8 forward of the same weights than quantising moves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import write_model
from served import Served

from infir2_core.config.hf_config import shape_from_hf
from infir2_core.convert.cast import cast
from infir2_core.convert.cast_plan import plan_cast
from infir2_core.convert.folder import open_folder, read_config
from infir2_core.data.batch import rows_to_batch
from infir2_core.model.decoder import Decoder
from infir2_core.model.hf import load_hf
from infir2_core.precision.recipe import load_recipe


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_nearer_to_our_forward_than_quantising_moves_it(tmp_path: Path, tied: bool) -> None:
    write_model(tmp_path / "hf", tied=tied)
    cast(plan_cast(open_folder(tmp_path / "hf"), False), tmp_path / "fp8", "cpu")
    tokens = torch.randint(131, (65,), generator=torch.Generator().manual_seed(1))
    recipe = load_recipe("infir2")
    specs = {name: spec.model_copy(update={"scale": "fp32"}) for name, spec in recipe.specs.items()}
    made = []
    for chosen in (recipe.model_copy(update={"specs": specs}), load_recipe("bf16")):
        model = Decoder(shape_from_hf(read_config(tmp_path / "hf"), "hf"), chosen)
        load_hf(model, tmp_path / "hf")
        with torch.no_grad():
            made.append(model.logits(rows_to_batch([tokens])))
    quantised, plain = made
    served = Served.load(tmp_path / "fp8", "cpu").logits(tokens[:-1].tolist()).float()
    assert (served - quantised).norm() < 0.6 * (plain - quantised).norm()
