"""`convert verify` finds every kind of damage, all of it at once, and says where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_models import edit_config, write_model
from safetensors.torch import load_file, save_file

from infir2_core.convert.cast import cast
from infir2_core.convert.cast_plan import plan_cast
from infir2_core.convert.folder import open_folder
from infir2_core.convert.verify import require, verify
from infir2_core.errors import InputError

NAME = "model.layers.0.mlp.up_proj.weight"
SCALE = NAME + "_scale_inv"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    write_model(root / "hf", shard="400KB")
    cast(plan_cast(open_folder(root / "hf")), root / "fp8")
    write_model(root / "one")
    cast(plan_cast(open_folder(root / "one")), root / "one-fp8")
    return root


@pytest.mark.parametrize(("name", "kind", "quantised"), [("hf", "bfloat16", 0), ("fp8", "fp8", 14)])
def test_sound_folders(folders: Path, name: str, kind: str, quantised: int) -> None:
    verdict = verify(folders / name)
    assert (verdict.problems, verdict.kind, verdict.quantised) == ([], kind, quantised)
    held = [t for file in (folders / name).glob("*.safetensors") for t in load_file(file).values()]
    assert verdict.tensors == len(held) and verdict.nbytes == sum(t.nbytes for t in held)
    require(folders / name, values=False)


def broken(folders: Path, target: Path, kind: str) -> Path:
    """A copy of the single-file FP8 folder with one kind of damage."""
    import shutil

    folder = Path(shutil.copytree(folders / "one-fp8", target / "broken"))
    file = folder / "model.safetensors"
    held = load_file(file)
    codes = held[NAME].view(torch.uint8)
    if kind == "missing scale":
        del held[SCALE]
    elif kind == "grid":
        held[SCALE] = held[SCALE][:1].contiguous()
    elif kind == "fp16 scale":
        held[SCALE] = held[SCALE].half()
    elif kind in ("NaN scale", "zero scale", "negative scale", "infinite scale"):
        wrong = {"NaN": float("nan"), "zero": 0.0, "negative": -1.0, "infinite": float("inf")}
        held[SCALE][1, 1] = wrong[kind.split()[0]]
    elif kind == "NaN code":
        codes[5, 5] = 0xFF
    elif kind == "NaN norm":
        held["model.norm.weight"][3] = float("nan")
    elif kind == "bf16 weight":
        held[NAME] = held[NAME].bfloat16()
    elif kind == "fp8 head":
        held["lm_head.weight"] = held["lm_head.weight"].to(torch.float8_e4m3fn)
    elif kind == "shape":
        held["model.norm.weight"] = held["model.norm.weight"][:-1].clone()
    elif kind == "missing":
        del held["model.norm.weight"]
    elif kind == "extra":
        held["model.layers.0.self_attn.q_norm.weight"] = torch.ones(3)
    elif kind == "stray scale":
        held["model.norm.weight_scale_inv"] = torch.ones(1)
    save_file(held, file, metadata={"format": "pt"})
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    if kind == "unknown scale_fmt":
        edit_config(folder, quantization_config=quantization | {"scale_fmt": "e5"})
    elif kind == "not pow2":
        edit_config(folder, quantization_config=quantization | {"scale_fmt": "ue8m0"})
    elif kind == "static":
        edit_config(folder, quantization_config=quantization | {"activation_scheme": "static"})
    elif kind == "block":
        edit_config(folder, quantization_config=quantization | {"weight_block_size": [128, 0]})
    elif kind == "no quantization_config":
        edit_config(folder, quantization_config=None)
    elif kind == "remote code":
        edit_config(folder, auto_map={"AutoModel": "evil.Model"})
    elif kind == "stray shard":
        save_file({"x": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    elif kind == "side link":
        (folder / "notes.md").symlink_to("/etc/hostname")
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif kind == "canary":
        file.write_bytes(b"\x80\x04cos\nsystem\n")
    return folder


CASES = {
    "missing scale": f"'{NAME}' has no scale: '{SCALE}' is missing",
    "grid": f"'{SCALE}' has the grid [1, 2], [384, 256] needs [3, 2]",
    "fp16 scale": f"'{SCALE}' has dtype float16, expected float32",
    "NaN scale": f"tensor '{SCALE}' has NaN, in row 1",
    "zero scale": f"'{SCALE}' has a zero scale",
    "negative scale": f"'{SCALE}' has a negative scale",
    "infinite scale": f"tensor '{SCALE}' has infinite values, in row 1",
    "NaN code": f"tensor '{NAME}' has NaN, in row 5",
    "NaN norm": "tensor 'model.norm.weight' has NaN, in row 3",
    "bf16 weight": f"'{NAME}' has dtype bfloat16, config.json says that it is quantised to E4M3",
    "fp8 head": "'lm_head.weight' has dtype float8_e4m3fn",
    "shape": "'model.norm.weight' has shape [255], config.json says [256]",
    "missing": "tensor 'model.norm.weight' is missing",
    "extra": "tensor 'model.layers.0.self_attn.q_norm.weight' has no place in this model",
    "stray scale": "'model.norm.weight_scale_inv' belongs to a weight that is not quantised",
    "unknown scale_fmt": "scale_fmt 'e5' is not known",
    "not pow2": "has scales that are no powers of two, scale_fmt says ue8m0",
    "static": "quantization_config.activation_scheme is 'static', expected 'dynamic'",
    "block": "weight_block_size is [128, 0]",
    "no quantization_config": "config.json does not say that it is quantised",
    "remote code": "auto_map asks loaders to run code",
    "stray shard": "model-00002-of-00002.safetensors is in no entry of the index",
    "side link": "notes.md is a link that leaves the folder",
    "truncated": "the file is truncated",
    "canary": "this is no safetensors file but a Python pickle",
}


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_of_damage_is_found(folders: Path, tmp_path: Path, kind: str) -> None:
    folder = broken(folders, tmp_path, kind)
    verdict = verify(folder)
    assert any(CASES[kind] in problem for problem in verdict.problems), verdict.problems
    with pytest.raises(InputError, match="the folder fails its check") as caught:
        require(folder)
    assert caught.value.exit_code == 3 and "infir2 convert verify" in caught.value.hint


def test_all_problems_are_named_at_once(folders: Path, tmp_path: Path) -> None:
    folder = broken(folders, tmp_path, "missing scale")
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"][0] = float("inf")
    held["model.layers.1.mlp.up_proj.weight_scale_inv"][0, 0] = 0
    save_file(held, folder / "model.safetensors")
    assert len(verify(folder).problems) == 3
    assert len(verify(folder, values=False).problems) == 1


@pytest.mark.parametrize("entry", ["../outside.safetensors", "gone.safetensors", 7])
def test_index_entries(folders: Path, tmp_path: Path, entry: object) -> None:
    import shutil

    folder = Path(shutil.copytree(folders / "fp8", tmp_path / "broken"))
    file = folder / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    home = content["weight_map"]["model.norm.weight"]
    content["weight_map"]["model.norm.weight"] = entry
    file.write_text(json.dumps(content))
    assert len(verify(folder).problems) == 1
    content["weight_map"]["model.norm.weight"] = next(
        f for f in content["weight_map"].values() if f not in (entry, home)
    )
    file.write_text(json.dumps(content))
    assert f"'model.norm.weight' is in {home}, the index names it" in verify(folder).problems[0]


def test_tensors_without_elements_are_no_work(folders: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(folders / "one", tmp_path / "broken"))
    file = folder / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    header["none"] = {"dtype": "BF16", "shape": [10**30, 0], "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + file.read_bytes()[8 + length :])
    assert verify(folder).problems == ["tensor 'none' has no place in this model"]


def test_links_of_the_hub_cache_are_followed_and_others_are_not(folders: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(p for p in (folders / "one-fp8").iterdir() if p.is_file()):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert verify(snapshot).problems == []
    (tmp_path / "elsewhere").write_bytes((snapshot / "model.safetensors").read_bytes())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "a link that leaves the folder" in verify(snapshot).problems[0]


@pytest.mark.parametrize("name", ["pytorch_model.bin", ".hidden", "extra/x.gguf", "notes.md", "deeper"])
def test_no_link_of_any_name_leaves_the_folder(folders: Path, tmp_path: Path, name: str) -> None:
    import shutil

    folder = Path(shutil.copytree(folders / "one-fp8", tmp_path / "fp8"))
    link = folder / name
    link.symlink_to(folder / "config.json")
    assert verify(folder).problems == []
    for target, words in ((tmp_path, "that leaves the folder"), (link, "leads nowhere"), ("gone", "leads nowhere")):
        link.unlink()
        link.symlink_to(target)
        assert verify(folder).problems[0].startswith(f"{name} is a link "), target
        with pytest.raises(InputError, match=words):
            require(folder, values=False)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(InputError, match="no such folder"):
        verify(Path("/nonexistent"))
