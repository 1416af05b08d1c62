"""What a Hugging Face folder must not be when it is cast, converted or trained from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_models import edit_config, write_model
from safetensors.torch import load_file, save_file

from infir2_core.config.hf_config import shape_from_hf
from infir2_core.convert.cast import cast
from infir2_core.convert.cast_plan import plan_cast
from infir2_core.convert.folder import open_folder
from infir2_core.convert.verify import verify
from infir2_core.convert.weights import HFWeights
from infir2_core.errors import InputError
from infir2_core.model.decoder import Decoder
from infir2_core.model.hf import load_hf
from infir2_core.precision.recipe import load_recipe


@pytest.mark.parametrize(
    ("shard", "name"), [("400KB", "model.safetensors"), ("400KB", "old.safetensors"), ("5GB", "b.safetensors")]
)
def test_a_second_set_of_weights_is_refused_everywhere(tmp_path: Path, shard: str, name: str) -> None:
    write_model(tmp_path / "hf", shard=shard)
    folder = tmp_path / "hf"
    shape = shape_from_hf(json.loads((folder / "config.json").read_text()), "config.json")
    open_folder(folder)
    save_file({"model.norm.weight": torch.ones(256)}, folder / name)
    for work in (open_folder, HFWeights, lambda path: load_hf(Decoder(shape, load_recipe("bf16")), path)):
        with pytest.raises(InputError, match=name) as caught:
            work(folder)
        assert caught.value.exit_code == 3 and caught.value.hint.startswith(f"rm {folder / name}")
    assert any(name in problem for problem in verify(folder).problems)


@pytest.mark.parametrize("value", [2, "full_attention", {"0": "full_attention"}])
def test_layer_types_of_another_type(tmp_path: Path, value: object) -> None:
    write_model(tmp_path / "hf", layers=1)
    edit_config(tmp_path / "hf", layer_types=value)
    for work in (open_folder, HFWeights):
        with pytest.raises(InputError, match="layer_types must be a list"):
            work(tmp_path / "hf")
    assert any("layer_types must be a list" in problem for problem in verify(tmp_path / "hf").problems)


def recast(folder: Path, dtype: torch.dtype, part: str) -> None:
    """Gives the tensors whose name has `part` another dtype."""
    held = load_file(folder / "model.safetensors")
    held |= {name: tensor.to(dtype) for name, tensor in held.items() if part in name}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_is_none(tmp_path: Path, key: str) -> None:
    write_model(tmp_path / "hf", layers=1)
    edit_config(tmp_path / "hf", **{key: "banana"})
    for work in (open_folder, HFWeights):
        with pytest.raises(InputError, match=f"{key} is 'banana', which names no dtype"):
            work(tmp_path / "hf")
    assert any("banana" in problem for problem in verify(tmp_path / "hf").problems)


@pytest.mark.parametrize(
    ("dtype", "part", "expected"),
    [
        (torch.float32, "weight", "dtype is bfloat16, and 9 weights have another"),
        (torch.float16, "embed_tokens", "dtype is bfloat16, and 1 weights have another"),
        (torch.float32, "up_proj", "the linear layers have several dtypes: float32"),
        (torch.float32, "norm", ""),
        (torch.float32, "bias", ""),
    ],
)
def test_dtypes_of_config_and_weights(tmp_path: Path, dtype: torch.dtype, part: str, expected: str) -> None:
    write_model(tmp_path / "hf", layers=1)
    recast(tmp_path / "hf", dtype, part)
    problems = verify(tmp_path / "hf").problems
    if not expected:
        assert problems == []
        cast(plan_cast(open_folder(tmp_path / "hf")), tmp_path / "fp8")
        return
    assert any(expected in problem for problem in problems), problems
    with pytest.raises(InputError):
        open_folder(tmp_path / "hf")
