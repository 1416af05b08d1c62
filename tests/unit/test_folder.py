"""What a Hugging Face folder must not be when it is cast, converted or trained from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hf_models import UNEVEN, edit_config, write_model
from safetensors.torch import load_file, save_file

from infir2_core.config.hf_config import shape_from_hf
from infir2_core.convert.cast import cast
from infir2_core.convert.cast_plan import plan_cast
from infir2_core.convert.folder import left_out, open_folder, side_files
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


@pytest.mark.parametrize(
    "skipped", [["mlp"], ["model.layers.0"], ["model.layers.*"], ["up_proj"], ["model.layers.0.mlp.up_proj"]]
)
def test_codes_in_layers_that_loaders_skip(tmp_path: Path, skipped: list[str]) -> None:
    write_model(tmp_path / "hf", layers=1)
    cast(plan_cast(open_folder(tmp_path / "hf")), tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    edit_config(tmp_path / "fp8", quantization_config=config | {"modules_to_not_convert": ["lm_head", *skipped]})
    verdict = verify(tmp_path / "fp8")
    assert any("up_proj.weight' is quantised, and modules_to_not_convert" in problem for problem in verdict.problems)
    cast(plan_cast(open_folder(tmp_path / "hf"), keep=("*",)), tmp_path / "kept")
    config = json.loads((tmp_path / "kept/config.json").read_text())["quantization_config"]
    edit_config(tmp_path / "kept", quantization_config=config | {"modules_to_not_convert": ["self_attn", "mlp"]})
    assert verify(tmp_path / "kept").problems == []


def test_a_scale_that_leaves_float32(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    cast(plan_cast(open_folder(tmp_path / "hf")), tmp_path / "fp8")
    file = tmp_path / "fp8/model.safetensors"
    held = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    for scale, sound in ((torch.finfo(torch.float32).max / 448, True), (1e36, False)):
        held[name][0, 0] = scale
        assert bool(torch.isfinite(448 * held[name]).all()) == sound
        save_file(held, file, metadata={"format": "pt"})
        assert any("448 times them is infinite" in problem for problem in verify(tmp_path / "fp8").problems) != sound


def test_uneven_blocks_are_noted_by_verify_as_by_the_cast(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1, sizes=UNEVEN)
    plan = plan_cast(open_folder(tmp_path / "hf"))
    cast(plan, tmp_path / "fp8")
    verdict = verify(tmp_path / "fp8")
    assert verdict.problems == [] and len(verdict.notes) == 1 and verdict.notes[0] in plan.notes
    assert "128x128 blocks do not divide" in verdict.notes[0] and verdict.as_dict()["notes"] == verdict.notes
    assert verify(tmp_path / "hf").notes == []


def test_weights_near_the_end_of_float32(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    held = load_file(tmp_path / "hf/model.safetensors")
    held["model.layers.0.mlp.up_proj.weight"][3, 3] = 3.3e38
    save_file(held, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    source = open_folder(tmp_path / "hf")
    cast(plan_cast(source), tmp_path / "fp8")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    report = json.loads((tmp_path / "fp8/cast_report.json").read_text(), parse_constant=refuse)
    assert 0 <= report["total"]["relative_error"] < 0.1
    with pytest.raises(InputError, match="up_proj.weight' is not finite in FP8.*power-of-two scale") as caught:
        cast(plan_cast(source, pow2=True), tmp_path / "pow2")
    assert "--keep 'model.layers.0.mlp.up_proj'" in caught.value.hint and not (tmp_path / "pow2").exists()


def test_what_cannot_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "hf", layers=1)
    (tmp_path / "hf/onnx").mkdir()
    (tmp_path / "hf/onnx/model.onnx").write_text("")
    (tmp_path / "hf/linked").symlink_to("extra")
    (tmp_path / "hf/pytorch_model.bin.index.json").write_text("{}")
    left = ["linked/", "onnx/model.onnx", "pytorch_model.bin", "pytorch_model.bin.index.json"]
    assert left_out(tmp_path / "hf") == left
    assert Path("extra/notes.txt") in side_files(tmp_path / "hf")
    scan, access = os.scandir, os.access

    def closed(path: object) -> object:
        if str(path).endswith("extra"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", closed)
        with pytest.raises(InputError, match="the folder cannot be read") as caught:
            plan_cast(open_folder(tmp_path / "hf")).as_dict()
    assert caught.value.where.endswith("hf/extra")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("notes.txt") and access(path, mode))
    with pytest.raises(InputError, match="the file cannot be read"):
        list(side_files(tmp_path / "hf"))
