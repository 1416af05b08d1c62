"""The FP8 cast against the trainer's own weights, transformers' quantiser and loader, and brute force."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import EVEN, UNEVEN, edit_config, write_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from infir2_core.config.hf_config import shape_from_hf
from infir2_core.convert import cast as cast_module
from infir2_core.convert.cast import cast
from infir2_core.convert.cast_plan import plan_cast
from infir2_core.convert.folder import open_folder
from infir2_core.convert.verify import require
from infir2_core.errors import InputError, UsageError
from infir2_core.model.decoder import Decoder
from infir2_core.model.hf import load_hf
from infir2_core.precision.recipe import Rule, load_recipe

FP8 = torch.float8_e4m3fn


def make(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    return cast(plan_cast(open_folder(folder), **options), out)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def dequantised(folder: Path, block: int = 128) -> dict[str, torch.Tensor]:
    """Every weight in float32, codes times their scales, written out element by element."""
    held, values = tensors(folder), {}
    for name, tensor in held.items():
        if name.endswith("_scale_inv"):
            continue
        values[name] = tensor.float()
        if tensor.dtype == FP8:
            scale = held[name + "_scale_inv"]
            rows = torch.arange(tensor.shape[0]) // block
            columns = torch.arange(tensor.shape[1]) // block
            values[name] = values[name] * scale[rows][:, columns]
    return values


@pytest.mark.parametrize("recipe", ["infir2", "infir2-fp32-scales"])
@pytest.mark.parametrize("tied", [True, False])
def test_codes_and_scales_are_those_that_training_uses_bit_for_bit(tmp_path: Path, recipe: str, tied: bool) -> None:
    write_model(tmp_path / "hf", tied=tied, dtype=torch.float32)  # masters with more bits than bf16 holds
    (tmp_path / "hf" / "recipe.json").write_text(load_recipe(recipe).to_json())
    report = make(tmp_path / "hf", tmp_path / "fp8")
    assert report["scale"] == ("pow2" if recipe == "infir2" else "fp32") and recipe in report["why"]
    trainer = Decoder(shape_from_hf(json.loads((tmp_path / "hf/config.json").read_text()), ""), load_recipe(recipe))
    load_hf(trainer, tmp_path / "hf")
    written, linears, compared = tensors(tmp_path / "fp8"), dict(trainer.linears()), 0
    for name, rows in trainer.hf_layout().items():
        linear = linears.get(rows.parameter.removesuffix(".weight"))
        if linear is None:
            continue
        operand = linear.fprop_weight()
        codes = operand.codes[rows.start : rows.stop].contiguous()
        assert torch.equal(codes.view(torch.uint8), written[name].view(torch.uint8)), name
        assert torch.equal(operand.scale_inv[rows.start // 128 : rows.stop // 128], written[name + "_scale_inv"]), name
        compared += 1
    assert compared == 14 and sum(t.dtype == FP8 for t in written.values()) == 14


def test_float32_scales_equal_transformers_quantiser(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    assert make(tmp_path / "hf", tmp_path / "fp8")["scale"] == "fp32"
    source, written = tensors(tmp_path / "hf"), tensors(tmp_path / "fp8")

    class Quantizer:
        quantization_config = FineGrainedFP8Config()

    oracle = Fp8Quantize(Quantizer())
    for name in (n for n in source if n.endswith("_proj.weight")):
        theirs = oracle.convert({name: source[name]})
        scale, expected = written[name + "_scale_inv"], theirs[name + "_scale_inv"]
        # torch divides a number by a tensor with two roundings, so their encode scale may be the neighbour of ours.
        largest = source[name].float().abs().unfold(0, 128, 128).unfold(1, 128, 128).amax((2, 3))
        encode = torch.full_like(largest, 448.0) / largest
        neighbours = [1 / encode, *(1 / encode.nextafter(encode * factor) for factor in (0.5, 2.0))]
        assert torch.equal(scale, neighbours[0])
        assert torch.stack([n == expected for n in neighbours]).any(0).all()
        same = (scale == expected).repeat_interleave(128, 0).repeat_interleave(128, 1)
        codes, theirs_codes = written[name].view(torch.uint8), theirs[name].view(torch.uint8)
        assert torch.equal(codes[same], theirs_codes[same]), name
        assert same.any() and (codes.int() - theirs_codes.int()).abs().max() <= 1  # elsewhere, a rounding may tip


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "edge blocks"])
def test_float32_scales_equal_llm_compressors_fp8_block(tmp_path: Path, sizes: dict[str, int]) -> None:
    """It computes scales in the dtype of the weights, so it gets the same values in float32."""
    compressor = pytest.importorskip("llmcompressor", reason="needs an environment with llmcompressor in it")
    quantization = pytest.importorskip("llmcompressor.modifiers.quantization")
    write_model(tmp_path / "hf", sizes=sizes)
    make(tmp_path / "hf", tmp_path / "fp8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    scheme = quantization.QuantizationModifier(targets="Linear", scheme="FP8_BLOCK", ignore=["lm_head"])
    compressor.oneshot(model=model, recipe=scheme)
    model.save_pretrained(tmp_path / "theirs", save_compressed=True)
    written, theirs = tensors(tmp_path / "fp8"), tensors(tmp_path / "theirs")
    names = [name for name, tensor in theirs.items() if tensor.dtype == FP8]
    assert sorted(names) == sorted(name for name, tensor in written.items() if tensor.dtype == FP8)
    for name in names:
        scale, expected = written[name + "_scale_inv"], theirs[name + "_scale"]
        assert expected.dtype == torch.float32
        assert (scale.view(torch.int32) - expected.view(torch.int32)).abs().max() <= 1
        rows, columns = written[name].shape
        same = (scale == expected).repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        codes, theirs_codes = written[name].view(torch.uint8).int(), theirs[name].view(torch.uint8).int()
        assert torch.equal(codes[same], theirs_codes[same]), name
        assert same.any() and (codes - theirs_codes).abs().max() <= 1  # elsewhere, a rounding may tip


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("shard", ["5GB", "400KB"])
def test_transformers_loads_the_folder_and_computes_what_its_weights_say(
    tmp_path: Path, pow2: bool, shard: str
) -> None:
    original = write_model(tmp_path / "hf", shard=shard)
    make(tmp_path / "hf", tmp_path / "fp8", pow2=pow2)
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) == (1 if shard == "5GB" else 6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    values = {name: value.bfloat16() for name, value in dequantised(tmp_path / "fp8").items()}
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, values[name]), name
    ids = torch.arange(2, 40)[None]
    before = original(ids).logits.float()
    original.load_state_dict(values)
    reference, theirs = original(ids).logits.float(), loaded(ids).logits.float()
    assert torch.allclose(theirs, reference, atol=2e-2)
    error = float(((theirs - before).norm() / before.norm()).detach())
    assert 0.01 < error < 0.1  # as large as E4M3 weights make it, and no larger


def test_config_index_metadata_and_side_files(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", shard="400KB", tied=True)
    before = {path: path.read_bytes() for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    make(tmp_path / "hf", tmp_path / "fp8", keep=("model.layers.1.self_attn.?_proj", "model.layers.0.mlp.down*"))
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    kept = ["model.layers.0.mlp.down_proj", *(f"model.layers.1.self_attn.{p}_proj" for p in "qkvo")]
    quantization = config.pop("quantization_config")
    assert sorted(quantization.pop("modules_to_not_convert")) == sorted(["lm_head", *kept])
    assert quantization == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    assert config == json.loads((tmp_path / "hf/config.json").read_text())
    source, written = tensors(tmp_path / "hf"), tensors(tmp_path / "fp8")
    index = json.loads((tmp_path / "fp8/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(written)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in written.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "fp8" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert name in opened.keys()
    for name, tensor in source.items():
        linear = name.endswith("_proj.weight") and name.removesuffix(".weight") not in kept
        assert (written[name].dtype == FP8) == linear
        assert linear or torch.equal(tensor, written[name])
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "chat_template.jinja", "README.md", "extra/notes.txt"):
        assert (tmp_path / "fp8" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    assert not (tmp_path / "fp8/pytorch_model.bin").exists() and not list(tmp_path.glob("*.partial"))
    assert {path: path.read_bytes() for path in before} == before


def test_blocks_with_tiny_values_keep_a_scale(tmp_path: Path) -> None:
    """A float16 scale would be zero for any block whose maximum is below about 1.3e-5."""
    write_model(tmp_path / "hf")
    held = tensors(tmp_path / "hf")
    name = "model.layers.0.self_attn.q_proj.weight"
    held[name][:128, :128] *= 1e-6 / held[name][:128, :128].abs().max()
    held[name][128:, :128] = 0
    save_file(held, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    for pow2 in (True, False):
        make(tmp_path / "hf", tmp_path / f"fp8-{pow2}", pow2=pow2)
        written = tensors(tmp_path / f"fp8-{pow2}")
        assert written[name + "_scale_inv"].dtype == torch.float32 and written[name + "_scale_inv"].min() > 0
        values, source = dequantised(tmp_path / f"fp8-{pow2}")[name], held[name].float()
        assert (values - source)[:128, :128].norm() < 0.04 * source[:128, :128].norm()
        assert not values[128:, :128].any()


@pytest.mark.parametrize("pow2", [True, False])
def test_edge_blocks_and_the_report_by_brute_force(tmp_path: Path, pow2: bool) -> None:
    write_model(tmp_path / "hf", sizes=UNEVEN, layers=1)
    report = make(tmp_path / "hf", tmp_path / "fp8", pow2=pow2)
    assert any("do not divide" in note for note in report["notes"])
    source, written, values = tensors(tmp_path / "hf"), tensors(tmp_path / "fp8"), dequantised(tmp_path / "fp8")
    error = square = 0.0
    for name, figures in report["tensors"].items():
        weight, scale = source[name].double(), written[name + "_scale_inv"]
        assert scale.shape == (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                largest = float(weight[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].abs().max())
                exact = largest / 448
                if pow2:
                    exact = 2.0 ** -torch.tensor(448 / largest, dtype=torch.float64).log2().floor()
                assert float(scale[i, j]) == pytest.approx(float(exact), rel=1e-6)
        difference = values[name].double() - weight
        assert figures["relative_error"] == pytest.approx(float(difference.norm() / weight.norm()), rel=1e-4)
        underflow = ((values[name] == 0) & (weight != 0)).double().mean()
        assert figures["underflow"] == pytest.approx(float(underflow))
        error, square = error + float(difference.square().sum()), square + float(weight.square().sum())
    assert report["total"]["relative_error"] == pytest.approx((error / square) ** 0.5, rel=1e-4)
    assert set(report["layers"]) == {"model.layers.0"}
    assert json.loads((tmp_path / "fp8/cast_report.json").read_text())["total"] == report["total"]
    require(tmp_path / "fp8")


@pytest.mark.parametrize("shard", ["5GB", "400KB"])
def test_an_interrupted_cast_continues_and_ends_with_the_same_bytes(
    tmp_path: Path, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "hf", shard=shard)
    make(tmp_path / "hf", tmp_path / "whole")
    real, calls = cast_module.quantize, 0

    def dying(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(cast_module, "quantize", dying)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "hf", tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()
    finished = {p: p.stat().st_mtime_ns for p in (tmp_path / "fp8.partial").glob("*.safetensors")}
    assert bool(finished) == (shard == "400KB")
    with pytest.raises(InputError, match="other settings"):
        make(tmp_path / "hf", tmp_path / "fp8", pow2=True)
    make(tmp_path / "hf", tmp_path / "fp8")
    for path, stamp in finished.items():
        assert (tmp_path / "fp8" / path.name).stat().st_mtime_ns == stamp  # not made again
    names = {str(p.relative_to(tmp_path / "whole")) for p in (tmp_path / "whole").rglob("*") if p.is_file()}
    assert names == {str(p.relative_to(tmp_path / "fp8")) for p in (tmp_path / "fp8").rglob("*") if p.is_file()}
    for name in names:
        assert (tmp_path / "fp8" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_an_unfinished_cast_of_a_source_that_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "hf", shard="400KB")

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(cast_module, "copy_file", full)
        with pytest.raises(InputError, match="no room for the output") as caught:
            make(tmp_path / "hf", tmp_path / "fp8")
    assert "type the same command again" in caught.value.hint and not (tmp_path / "fp8").exists()
    name = sorted((tmp_path / "hf").glob("*.safetensors"))[0]
    name.write_bytes(name.read_bytes())
    with pytest.raises(InputError, match="the source has changed") as caught:
        make(tmp_path / "hf", tmp_path / "fp8")
    assert f"rm -r {tmp_path / 'fp8.partial'}" in caught.value.hint
    shutil.rmtree(tmp_path / "fp8.partial")
    make(tmp_path / "hf", tmp_path / "fp8")


def test_a_folder_that_fails_its_check_never_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "hf")
    real = cast_module.quantize

    def wrong(*arguments: Any) -> Any:
        made = real(*arguments)
        made.row.scale.zero_()
        return made

    monkeypatch.setattr(cast_module, "quantize", wrong)
    with pytest.raises(InputError, match="fails its check: .* has a zero scale"):
        make(tmp_path / "hf", tmp_path / "fp8")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def poison(folder: Path, value: float) -> None:
    held = load_file(folder / "model.safetensors")
    held["model.layers.1.mlp.up_proj.weight"][200, 3] = value
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def damage(folder: Path, kind: str) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    if kind == "no index":
        (folder / "model-00001-of-00002.safetensors").write_bytes(file.read_bytes())
        file.unlink()
    elif kind == "missing shard":
        index = {"weight_map": dict.fromkeys(held, "model.safetensors") | {"lm_head.weight": "gone.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "index elsewhere":
        index = {"weight_map": dict.fromkeys(held, "model.safetensors") | {"lm_head.weight": "../x.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "link":
        file.rename(folder.parent / "elsewhere")
        file.symlink_to(folder.parent / "elsewhere")
    elif kind == "side link":
        (folder.parent / "elsewhere").write_text("secret")
        (folder / "notes.md").symlink_to(folder.parent / "elsewhere")
    elif kind == "shape":
        edit_config(folder, intermediate_size=512)
    elif kind == "dtype":
        held["model.norm.weight"] = held["model.norm.weight"].to(torch.int32)
        save_file(held, file)
    elif kind == "NaN":
        poison(folder, float("nan"))
    elif kind == "infinity":
        poison(folder, float("-inf"))
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-9])
    elif kind == "short header":
        file.write_bytes(file.read_bytes()[:100])
    elif kind == "pickle":
        torch.save({"x": torch.zeros(2)}, file)
    elif kind == "web page":
        file.write_text("<!DOCTYPE html><html>rate limited</html>")
    elif kind == "class":
        edit_config(folder, model_type="llama")
    elif kind == "quantised":
        edit_config(folder, quantization_config={"quant_method": "awq"})
    elif kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "recipe":
        text = load_recipe("infir2").to_json().replace('"pow2"', '"fp32"', 1)
        (folder / "recipe.json").write_text(text)
    elif kind == "recipe list":
        (folder / "recipe.json").write_text("[]")
    elif kind == "too large for bf16":
        held = {name: tensor.float() for name, tensor in held.items()}
        held["model.layers.0.mlp.up_proj.weight"] = torch.full((384, 256), 3.4028e38)
        save_file(held, file, metadata={"format": "pt"})
        edit_config(folder, dtype="float32")
    elif kind == "endless config":
        edit_config(folder, num_hidden_layers=10**8)
    elif kind == "half a character":
        edit_config(folder, comment="\ud800")
    elif kind == "pipe":
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")


BAD = {
    "no index": "model.safetensors.index.json is missing",
    "missing shard": "shard gone.safetensors is missing",
    "index elsewhere": "points outside the folder",
    "link": "a link that leaves the folder",
    "side link": "notes.md is a link that leaves the folder",
    "shape": "'model.layers.0.mlp.gate_proj.weight' has shape [384, 256], config.json says [512, 256]",
    "dtype": "'model.norm.weight' has dtype torch.int32",
    "NaN": "tensor 'model.layers.1.mlp.up_proj.weight' has NaN, in row 200",
    "infinity": "tensor 'model.layers.1.mlp.up_proj.weight' has infinite values, in row 200",
    "truncated": "the file is truncated",
    "short header": "ends inside its header",
    "pickle": "this is no safetensors file but a zip archive, as torch.save writes",
    "web page": "this is no safetensors file but a web page",
    "class": "model_type is 'llama'; infir2 trains Qwen2.5-family models only",
    "quantised": "the model is quantised already (awq)",
    "no config": "it has no config.json",
    "recipe": "the stored recipe was changed by hand",
    "recipe list": "the recipe is not an object",
    "too large for bf16": "has the value 3.4028e+38, which bfloat16 cannot hold",
    "endless config": "layers: Input should be less than or equal to 8192 (got 100000000)",
    "half a character": "config.json cannot be read",
    "pipe": "config.json is no file",
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "hf")
    damage(tmp_path / "hf", kind)
    with pytest.raises(InputError) as caught:
        make(tmp_path / "hf", tmp_path / "fp8")
    assert BAD[kind] in caught.value.what
    assert caught.value.exit_code == 3 and (caught.value.where or caught.value.hint)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "elsewhere") == ["hf"]


def test_the_output_may_not_exist_nor_cover_the_source(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "hf")
    refused = {
        "there": "exists already",
        "hf": "over the source",
        ".": "over the source",
        "hf/fp8": "inside the source",
    }
    for out, words in refused.items():
        with pytest.raises(InputError, match=words):
            make(tmp_path / "hf", tmp_path / out)
    with pytest.raises(InputError, match="over the source"):
        make(tmp_path / "link", tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "link", "there"]


def test_what_is_in_the_way_of_an_output(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="exists already"):
        make(tmp_path / "hf", tmp_path / "loop")
    journal = tmp_path / "fp8.partial/.infir2"
    journal.mkdir(parents=True)
    (journal / "plan.json").write_bytes(b"\xff")
    with pytest.raises(InputError, match="of another version of infir2, or a damaged one"):
        make(tmp_path / "hf", tmp_path / "fp8")


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "hf")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(InputError, match="no room for the output: it needs .* 0.00 GB are free"):
        make(tmp_path / "hf", tmp_path / "fp8")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": ("model.layers.7.*",)}, "matches no linear layer"),
        ({"keep": ("model.layers.0.self_attn.k_proj",)}, "but not model.layers.0.self_attn.q_proj"),
        ({"scale_fmt": "ue8m0"}, "declares power-of-two scales"),
        ({"scale_fmt": "e5m2", "pow2": True}, "not known"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    write_model(tmp_path / "hf")
    with pytest.raises(UsageError, match=words):
        make(tmp_path / "hf", tmp_path / "fp8", **options)


@pytest.mark.parametrize(
    ("recipe", "scale", "why"),
    [
        ("infir2", "pow2", "as recipe infir2 trained it"),
        ("fp8-current", "fp32", "no rule for block FP8"),
        ("bf16", "fp32", "unquantised"),
    ],
)
def test_the_recipe_of_the_source_decides_and_flags_win(tmp_path: Path, recipe: str, scale: str, why: str) -> None:
    write_model(tmp_path / "hf", layers=1)
    (tmp_path / "hf" / "recipe.json").write_text(load_recipe(recipe).to_json())
    plan = plan_cast(open_folder(tmp_path / "hf"))
    assert plan.rule.spec.scale == scale and why in plan.rule.why and any(why in note for note in plan.notes)
    other = plan_cast(open_folder(tmp_path / "hf"), pow2=scale != "pow2")
    assert other.rule.spec.scale != scale and "pow2-scale" in other.rule.why


def test_layers_that_the_recipe_left_alone_are_kept(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=3)
    recipe = load_recipe("infir2")
    rules = (Rule(match="first:1", use="bf16"), *recipe.layers)
    (tmp_path / "hf" / "recipe.json").write_text(recipe.model_copy(update={"layers": rules}).to_json())
    make(tmp_path / "hf", tmp_path / "fp8")
    written = tensors(tmp_path / "fp8")
    for index in range(3):
        assert (written[f"model.layers.{index}.mlp.up_proj.weight"].dtype == FP8) == (index > 0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    assert torch.isfinite(loaded(torch.arange(5)[None]).logits).all()


def test_ue8m0_is_declared_and_transformers_loads_it(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    make(tmp_path / "hf", tmp_path / "plain", pow2=True)
    report = make(tmp_path / "hf", tmp_path / "fp8", pow2=True, scale_fmt="ue8m0")
    assert report["quantization_config"]["scale_fmt"] == "ue8m0" and any("transformers" in n for n in report["notes"])
    require(tmp_path / "fp8")
    ids = torch.arange(9)[None]
    two = [AutoModelForCausalLM.from_pretrained(tmp_path / n, dtype=torch.bfloat16)(ids) for n in ("plain", "fp8")]
    assert torch.equal(two[0].logits, two[1].logits)


def test_other_block_sizes(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", sizes=EVEN)
    make(tmp_path / "hf", tmp_path / "fp8", block=(64, 32))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    written, name = tensors(tmp_path / "fp8"), "model.layers.1.mlp.down_proj.weight"
    assert written[name + "_scale_inv"].shape == (4, 12)
    values = written[name].float() * written[name + "_scale_inv"].repeat_interleave(64, 0).repeat_interleave(32, 1)
    assert torch.equal(loaded.get_parameter(name), values.bfloat16())
    require(tmp_path / "fp8")
