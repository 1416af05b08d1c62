"""Hugging Face folders against transformers: each loads what the other saved, and broken folders are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model import SHAPES, hf_twin, rows
from transformers import AutoModelForCausalLM

from infir2_core.config.hf_config import shape_from_hf
from infir2_core.data.batch import rows_to_batch
from infir2_core.errors import InputError
from infir2_core.model.decoder import Decoder
from infir2_core.model.hf import load_hf, save_hf
from infir2_core.precision.recipe import load_recipe


def saved_by_transformers(folder: Path, name: str, shard: str = "5GB") -> torch.nn.Module:
    torch.manual_seed(1)
    theirs = hf_twin(SHAPES[name])
    theirs.save_pretrained(folder, max_shard_size=shard)
    return theirs


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_what_transformers_saves_we_load(tmp_path: Path, name: str, shard: str) -> None:
    theirs = saved_by_transformers(tmp_path, name, shard)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard == "20KB")
    shape = shape_from_hf(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert shape == SHAPES[name]
    ours = Decoder(shape, load_recipe("fp32"))
    load_hf(ours, tmp_path)
    row = rows(shape, (13,), seed=2)[0]
    expected = theirs(row[None, :-1]).logits[0]
    assert torch.allclose(ours.logits(rows_to_batch([row])), expected, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_what_we_save_transformers_loads(tmp_path: Path, name: str, shard_bytes: int) -> None:
    shape = SHAPES[name]
    ours = Decoder(shape, load_recipe("fp32"))
    ours.initialise(0.3, seed=5)
    save_hf(ours, tmp_path, dtype=torch.float32, shard_bytes=shard_bytes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    row = rows(shape, (11,), seed=2)[0]
    assert torch.allclose(ours.logits(rows_to_batch([row])), theirs(row[None, :-1]).logits[0], atol=1e-5)


def test_round_trip_in_bf16_is_exact_and_has_metadata(tmp_path: Path) -> None:
    ours = Decoder(SHAPES["untied-mha"], load_recipe("fp32"))
    ours.initialise(0.3, seed=5)
    save_hf(ours, tmp_path)
    again = Decoder(SHAPES["untied-mha"], load_recipe("fp32"))
    load_hf(again, tmp_path)
    for name, view in ours.hf_views().items():
        assert torch.equal(view.bfloat16().float(), again.hf_views()[name]), name
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    with pytest.raises(InputError, match="already holds a model"):
        save_hf(ours, tmp_path)


@pytest.mark.parametrize(
    "damage,message",
    [
        ("missing", "tensors are missing, the first is 'model.layers.0.mlp.down_proj.weight'"),
        ("shape", "'model.norm.weight' has shape [7]"),
        ("dtype", "has dtype torch.int32"),
        ("fp8", "this one is quantised"),
        ("extra", "the first is 'model.layers.0.self_attn.q_norm.weight'"),
        ("truncated", "not a readable safetensors file"),
        ("none", "no safetensors weights"),
    ],
)
def test_broken_folders_are_named(tmp_path: Path, damage: str, message: str) -> None:
    saved_by_transformers(tmp_path, "untied-mha")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if damage == "missing":
        del tensors["model.layers.0.mlp.down_proj.weight"]
    elif damage == "shape":
        tensors["model.norm.weight"] = torch.zeros(7)
    elif damage == "dtype":
        tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int32)
    elif damage == "fp8":
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    elif damage == "extra":
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(3)
    save_file(tensors, file, metadata={"format": "pt"})
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-500])
    elif damage == "none":
        file.unlink()
    with pytest.raises(InputError) as caught:
        load_hf(Decoder(SHAPES["untied-mha"], load_recipe("fp32")), tmp_path)
    text = f"{caught.value.what} {caught.value.hint}"
    assert message in text, text


@pytest.mark.parametrize(
    "entry,message", [("../outside.safetensors", "outside the folder"), ("gone.safetensors", "missing")]
)
def test_an_index_may_not_leave_the_folder_or_name_a_missing_shard(tmp_path: Path, entry: str, message: str) -> None:
    saved_by_transformers(tmp_path, "untied-mha", "20KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = entry
    index.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        load_hf(Decoder(SHAPES["untied-mha"], load_recipe("fp32")), tmp_path)
