"""Conversions between Hugging Face folders and native checkpoints: bit for bit, with everything that stands beside."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import edit_config, write_model
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from test_engine import engine
from test_model import SHAPES, rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from infir2_core.config.runfile import write_config
from infir2_core.config.schema import ModelShape, RunConfig, Source
from infir2_core.convert.card import Facts, card_text, folder_card
from infir2_core.convert.compare import compare
from infir2_core.convert.export import Beside, export_hf
from infir2_core.convert.native_in import surroundings
from infir2_core.convert.native_out import export_native
from infir2_core.convert.verify import require
from infir2_core.convert.weights import HFWeights, NativeWeights, open_weights
from infir2_core.data.batch import rows_to_batch
from infir2_core.data.tokenizer import ByteTokenizer
from infir2_core.engines.native import NativeEngine
from infir2_core.errors import InputError
from infir2_core.hub import hub_name
from infir2_core.model.decoder import Decoder
from infir2_core.model.hf import save_hf
from infir2_core.ops.reference.moments import join
from infir2_core.precision.recipe import load_recipe
from infir2_core.train.checkpoint import CheckpointStore
from infir2_core.train.manifest import seal
from infir2_core.train.shards import row_shard


def same(folder: Path, other: Path) -> bool:
    """Both folders hold the same tensors, read by safetensors itself."""

    def held(path: Path) -> dict[str, torch.Tensor]:
        return {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}

    a, b = held(folder), held(other)
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def checkpoint(folder: Path, model: Decoder, step: int = 7, world: int = 1, recipe: str = "") -> Path:
    """A native checkpoint with moments beside the masters, its rows split over `world` ranks."""
    barrier = threading.Barrier(world)
    views = {f"model/{name}": view for name, view in model.hf_views().items()}
    views |= {f"adam.m/{name}": torch.full_like(view, 3.0) for name, view in model.hf_views().items()}
    state = {"engine": {"updates": 1, "recipe": recipe, "model": model.shape.model_dump()}}

    def write(rank: int) -> None:
        store = CheckpointStore(folder, rank=rank, world=world, barrier=barrier.wait)
        shards = {name: row_shard(tuple(view.shape), rank, world, 8) for name, view in views.items()}
        mine = {name: views[name][s.offset : s.offset + s.rows].contiguous() for name, s in shards.items()}
        store.save(step, mine, state, shards, blocking=True)

    ranks = [threading.Thread(target=write, args=(rank,)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return folder / f"step-{step:08d}"


def trained(shape: ModelShape) -> Decoder:
    model = Decoder(shape, load_recipe("fp32"))
    model.initialise(0.3, seed=5)
    return model


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("world", [1, 3])
def test_a_native_checkpoint_becomes_the_folder_that_the_model_itself_saves(
    tmp_path: Path, name: str, world: int
) -> None:
    model = trained(SHAPES[name])
    path = checkpoint(tmp_path / "run", model, world=world)
    export_hf(NativeWeights(path, model.shape), tmp_path / "hf", shard_bytes=20_000)
    save_hf(model, tmp_path / "expected")
    assert same(tmp_path / "hf", tmp_path / "expected")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    require(tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).float()
    row = rows(model.shape, (11,), seed=2)[0]
    ours = Decoder(model.shape, load_recipe("bf16"))
    ours.load_state_dict(model.state_dict())
    expected, found = ours.logits(rows_to_batch([row])), theirs(row[None, :-1]).logits[0]
    assert (expected - found).norm() < 0.02 * found.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
def test_hf_to_native_to_hf_is_bit_for_bit(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    write_model(tmp_path / "hf", dtype=dtype, tied=tied, shard="400KB")
    export_native(HFWeights(tmp_path / "hf"), tmp_path / "native")
    native = open_weights(tmp_path / "native", "A")
    assert native.kind == "native"
    export_hf(native, tmp_path / "again", str(dtype).removeprefix("torch."), Beside(tmp_path / "hf"))
    assert same(tmp_path / "hf", tmp_path / "again")
    for side in ("tokenizer.json", "merges.txt", "chat_template.jinja", "extra/notes.txt", "generation_config.json"):
        assert (tmp_path / "again" / side).read_bytes() == (tmp_path / "hf" / side).read_bytes()
    ours, theirs = (AutoConfig.from_pretrained(tmp_path / n).to_dict() for n in ("again", "hf"))
    assert {k: v for k, v in ours.items() if k != "_name_or_path"} == {
        k: v for k, v in theirs.items() if k != "_name_or_path"
    }


def test_a_variant_is_cast_and_compared_but_not_trained(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    edit_config(tmp_path / "hf", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert compare(HFWeights(tmp_path / "hf"), HFWeights(tmp_path / "hf"))["equal"]
    with pytest.raises(InputError, match="rope scaling 'yarn' is not supported"):
        HFWeights(tmp_path / "hf", trained=True)


def test_training_starts_from_a_converted_checkpoint(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    export_native(HFWeights(tmp_path / "hf"), tmp_path / "native")
    loaded = CheckpointStore(tmp_path).load(tmp_path / "native")
    assert loaded.step == 0 and loaded.state["engine"]["model"]["hidden"] == 256
    assert loaded.state["engine"]["model"]["rope_base"] == 1e6
    source = load_file(tmp_path / "hf/model.safetensors")
    assert loaded.tensors.keys() == {f"model/{name}" for name in source}
    assert all(torch.equal(loaded.tensors[f"model/{name}"], tensor.float()) for name, tensor in source.items())


def run_folder(folder: Path, model: Decoder, source: Source, recipe: str = "infir2", tokenizer: str = "byte") -> Path:
    """A run of ours with one checkpoint, settings, recipe and metrics."""
    from infir2_core.config.presets import load_preset

    run = folder / "runs" / "mine"
    checkpoint(run / "checkpoints", model)
    settings = load_preset("tiny").cpt.model_copy(update={"recipe": recipe})
    config = RunConfig(
        name="mine", runs=str(folder / "runs"), size="tiny", model=model.shape, source=source, cpt=settings,
        data=[{"prefix": str(folder / "data/web"), "weight": 0.5, "content": "abc123"}], tokenizer=tokenizer,
    )  # fmt: skip
    write_config(config, run / "config.toml")
    (run / "recipe.json").write_text(load_recipe(recipe).to_json())
    lines = [
        {"kind": "step", "step": 6, "loss": 3.5}, {"kind": "eval", "step": 7, "loss": 3.25},
        {"kind": "step", "step": 7, "loss": 3.0}, {"kind": "step", "step": 8, "loss": 99.0},
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_an_export_carries_recipe_card_and_the_byte_tokenizer(tmp_path: Path) -> None:
    model = trained(SHAPES["tied-gqa"])
    run = run_folder(tmp_path, model, Source(kind="scratch"))
    weights = open_weights(run, "RUN")
    assert isinstance(weights, NativeWeights)
    export_hf(weights, tmp_path / "hf", beside=surroundings(weights, None, "bfloat16").beside)
    assert json.loads((tmp_path / "hf/recipe.json").read_text())["hash"] == load_recipe("infir2").hash
    card = (tmp_path / "hf/README.md").read_text()
    for text in ("infir2", "wsd", "0.002", "3.0000", "3.2500", "abc123", "| step | 7 |", "library_name: transformers"):
        assert text in card, text
    assert "99" not in card and str(tmp_path) not in card
    ours, theirs = ByteTokenizer(), AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("Hello, wörld!\n\t 数", "", "  two  spaces", "\x00\x7f"):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eod
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == ours.eod


def test_the_origin_of_a_run_gives_config_tokenizer_and_licence(tmp_path: Path) -> None:
    home = tmp_path / "models--Some--Model/snapshots/12ab"
    write_model(home, layers=1)
    model = Decoder(HFWeights(home).shape, load_recipe("fp32"))
    model.initialise(0.02, seed=1)
    run = run_folder(tmp_path, model, Source(kind="hf", path=str(home)))
    weights = open_weights(run / "checkpoints/step-00000007", "RUN")
    assert isinstance(weights, NativeWeights)
    found = surroundings(weights, None, "bfloat16")
    assert any("which the run started from" in note for note in found.notes)
    export_hf(weights, tmp_path / "hf", beside=found.beside)
    card = (tmp_path / "hf/README.md").read_text()
    assert "license: apache-2.0" in card and "base_model: Some/Model" in card
    assert (tmp_path / "hf/merges.txt").is_file() and not (tmp_path / "hf/pytorch_model.bin").exists()
    assert json.loads((tmp_path / "hf/config.json").read_text())["bos_token_id"] == 1
    edit_config(home, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    with pytest.raises(
        InputError, match="the origin says rope_base = 500000.0, the weights were trained with 1000000.0"
    ):
        export_hf(weights, tmp_path / "other", beside=found.beside)
    edit_config(home, intermediate_size=512)
    with pytest.raises(InputError, match="another architecture: 'model.layers.0.mlp.down_proj.weight'"):
        export_hf(weights, tmp_path / "other", beside=found.beside)


def test_a_checkpoint_moved_away_from_its_run_still_knows_a_shipped_recipe(tmp_path: Path) -> None:
    model = trained(SHAPES["tied-gqa"])
    path = checkpoint(tmp_path, model, recipe=load_recipe("infir2").hash)
    found = surroundings(NativeWeights(path, model.shape), None, "bfloat16")
    assert json.loads(found.beside.texts["recipe.json"])["name"] == "infir2"
    assert any("no tokenizer" in note for note in found.notes)


def test_the_name_of_a_folder_of_the_hub_cache(tmp_path: Path) -> None:
    assert hub_name(tmp_path / "models--Qwen--Qwen2.5-7B/snapshots/0a1b") == "Qwen/Qwen2.5-7B"
    assert hub_name(tmp_path / "Qwen2.5-7B") == ""
    assert "base_model" not in card_text(Facts("x", 1, "bfloat16"))


@pytest.mark.parametrize(
    "front",
    [
        b"license: [unclosed", b"- a", b"x: !!python/object/apply:os.system ['true']", b"eval_results: x", b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_damaged_card_is_named_and_no_reason_to_refuse_weights(tmp_path: Path, front: bytes) -> None:
    write_model(tmp_path / "hf", layers=1)
    (tmp_path / "hf/README.md").write_bytes(b"---\n" + front + b"\n---\n# x\n")
    with pytest.raises(InputError, match="the card cannot be read") as caught:
        folder_card(tmp_path / "hf")
    assert caught.value.where == str(tmp_path / "hf/README.md")
    assert "license" not in card_text(Facts("x", 1, "bfloat16", origin=tmp_path / "hf"))


def test_odd_tags_of_a_card_are_left_out(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    (tmp_path / "hf/README.md").write_text("---\ntags: [1, null, mine]\nlicense: mit\n---\n# x\n")
    front = ModelCard(folder_card(tmp_path / "hf")).data.to_dict()
    assert front["tags"] == ["infir2", "mine"] and front["license"] == "mit"


def test_other_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1, dtype=torch.float64)
    with pytest.raises(InputError, match="'model.embed_tokens.weight' has dtype torch.float64, expected bf16"):
        HFWeights(tmp_path / "hf")


def test_comparing_names_the_first_difference(tmp_path: Path) -> None:
    write_model(tmp_path / "a", shard="400KB")
    write_model(tmp_path / "b")
    a, b = HFWeights(tmp_path / "a"), HFWeights(tmp_path / "b")
    result = compare(a, b)
    assert result["equal"] and result["tensors"] == 27 and result["first"] is None
    held = load_file(tmp_path / "b/model.safetensors")
    held["model.layers.1.mlp.up_proj.weight"][300, 5] += 1
    held["model.layers.1.mlp.up_proj.weight"][301, 4] = 7
    held["lm_head.weight"][0, 0] = 5
    save_file(held, tmp_path / "b/model.safetensors")
    result = compare(a, HFWeights(tmp_path / "b"))
    assert not result["equal"]
    assert result["different"] == {"model.layers.1.mlp.up_proj.weight": 2, "lm_head.weight": 1}
    assert result["first"]["tensor"] == "model.layers.1.mlp.up_proj.weight" and result["first"]["at"] == [300, 5]
    assert result["first"]["b"] == pytest.approx(result["first"]["a"] + 1, abs=0.01)


def test_comparing_rounds_masters_to_what_was_exported(tmp_path: Path) -> None:
    model = trained(SHAPES["untied-mha"])
    native = NativeWeights(checkpoint(tmp_path / "run", model), model.shape)
    export_hf(native, tmp_path / "hf")
    result = compare(native, HFWeights(tmp_path / "hf"))
    assert result["equal"] and result["dtypes"] == ["float32 / bfloat16"]


def test_shapes_and_names_that_differ(tmp_path: Path) -> None:
    write_model(tmp_path / "a", layers=1)
    write_model(tmp_path / "b", layers=2, tied=True, vocab=140)
    result = compare(HFWeights(tmp_path / "a"), HFWeights(tmp_path / "b"))
    assert result["only_a"] == ["lm_head.weight"] and len(result["only_b"]) == 12
    assert result["shapes"] == {"model.embed_tokens.weight": [[131, 256], [140, 256]]}


@pytest.mark.parametrize("kind", ["flipped", "missing file", "no weights", "NaN", "fp16", "run without", "shape"])
def test_bad_sources_are_named_and_leave_nothing(tmp_path: Path, kind: str) -> None:
    model = trained(SHAPES["tied-gqa"])
    if kind == "NaN":
        model.embed.data[3, 4] = float("nan")
    elif kind == "fp16":
        model.embed.data[3, 4] = 1e6
    path = checkpoint(tmp_path / "c", model)
    file = path / "rank-00000.safetensors"
    expected: dict[str, Any] = {
        "flipped": "its sha256 is not the one in the manifest", "missing file": "a file of the checkpoint is missing",
        "no weights": "no weights here", "NaN": "tensor 'model.embed_tokens.weight' has NaN, in row 3",
        "fp16": "has the value 1e+06, which float16 cannot hold", "run without": "has no complete checkpoint",
        "shape": "its model needs",
    }  # fmt: skip
    if kind == "flipped":
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    elif kind == "missing file":
        file.unlink()
    elif kind == "no weights":
        path = tmp_path / "empty"
        path.mkdir()
    elif kind == "run without":
        path = tmp_path / "run"
        (path / "checkpoints").mkdir(parents=True)
        (path / "config.toml").write_text("")
    shape = model.shape.model_copy(update={"ffn": 96}) if kind == "shape" else model.shape
    with pytest.raises(InputError) as caught:
        weights = NativeWeights(path, shape) if kind == "shape" else open_weights(path, "A")
        export_hf(weights, tmp_path / "out", "float16" if kind == "fp16" else "bfloat16")
    assert expected[kind] in caught.value.what
    assert not list(tmp_path.glob("out*"))


def lean_checkpoint(folder: Path) -> tuple[Path, NativeEngine]:
    """A checkpoint of a run with split masters, after two steps."""
    shape = ModelShape(
        layers=1, hidden=128, ffn=256, heads=2, kv_heads=1, head_dim=64, vocab=260, tied=True, max_positions=64
    )
    made = engine("infir2-lean", shape)
    made.model.initialise(0.05, seed=3)
    for seed in range(2):
        made.train_step([rows_to_batch(rows(shape, (30,), seed=seed))], 1e-2).result()
    state = {"engine": made.state(), "position": {}, "data": []}
    CheckpointStore(folder).save(2, made.tensors(), state, blocking=True)
    return folder / "step-00000002", made


def test_split_masters_are_whole_again_and_bf16_is_what_training_used(tmp_path: Path) -> None:
    path, made = lean_checkpoint(tmp_path / "checkpoints")
    masters = {}
    for name, rows_of in made.model.hf_layout().items():
        weight = dict(made.model.named_parameters())[rows_of.parameter].detach()
        slot = made.optimizer.slots.get(rows_of.parameter)
        whole = weight if slot is None or slot.remainder is None else join(weight, slot.remainder)
        masters[name] = whole[rows_of.start : rows_of.stop]
    weights = NativeWeights(path, made.model.shape)
    assert {dtype for dtype, _ in weights.tensors.values()} == {torch.float32}
    export_hf(weights, tmp_path / "wide", "float32")
    export_hf(weights, tmp_path / "bf16")
    wide, narrow = load_file(tmp_path / "wide/model.safetensors"), load_file(tmp_path / "bf16/model.safetensors")
    for name, master in masters.items():
        assert torch.equal(wide[name], master.float()), name
        assert torch.equal(narrow[name], made.model.hf_views()[name].bfloat16()), name
    for other in ("wide", "bf16"):
        assert compare(weights, HFWeights(tmp_path / other))["equal"]
    changed = dict(wide)
    changed["model.norm.weight"] = wide["model.norm.weight"] + 1e-6
    save_file(changed, tmp_path / "wide/model.safetensors", metadata={"format": "pt"})
    assert not compare(weights, HFWeights(tmp_path / "wide"))["equal"]


def test_a_manifest_that_leaves_rows_out_is_refused(tmp_path: Path) -> None:
    path, made = lean_checkpoint(tmp_path / "checkpoints")
    content = json.loads((path / "manifest.json").read_text())
    content.pop("sha256")
    for kind in ("model", "remainder"):
        content["tensors"][f"{kind}/model.embed_tokens.weight"]["parts"][0]["rows"] -= 5
        (path / "manifest.json").write_text(seal(content))
        with pytest.raises(InputError, match="rows of 260"):
            NativeWeights(path, made.model.shape)
        content["tensors"][f"{kind}/model.embed_tokens.weight"]["parts"][0]["rows"] += 5


@pytest.mark.parametrize("damage", ["values", "shape", "dtype"])
def test_a_tied_head_that_is_not_the_embedding_is_refused(damage: str, tmp_path: Path) -> None:
    """Loaders differ in what they make of it; one that equals the embedding is dropped."""
    write_model(tmp_path / "model", layers=1, tied=True)
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    require(tmp_path / "model")
    assert "lm_head.weight" not in HFWeights(tmp_path / "model").tensors
    heads = {"values": embedding + 1, "shape": embedding[:3, :3], "dtype": embedding.float()}
    save_file(tensors | {"lm_head.weight": heads[damage].contiguous()}, file, metadata={"format": "pt"})
    for opened in (require, HFWeights):
        with pytest.raises(InputError, match="config.json ties it"):
            opened(tmp_path / "model")
