"""torch_dist checkpoints that megatron-core itself wrote, and that it reads: names, groupings, padding, objects."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import write_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from infir2_core.config.presets import load_preset
from infir2_core.convert.compare import compare
from infir2_core.convert.export import export_hf
from infir2_core.convert.megatron.archive import Archive
from infir2_core.convert.megatron.dist import DistCheckpoint, find_iteration
from infir2_core.convert.megatron.names import EMBEDDING, FC2, PROJ, QKV
from infir2_core.convert.megatron.pickles import Inert, plain, read_pickle
from infir2_core.convert.megatron.surroundings import recipe_of, surroundings
from infir2_core.convert.megatron.weights import MegatronWeights
from infir2_core.convert.megatron.write import export_megatron
from infir2_core.convert.weights import HFWeights, open_weights
from infir2_core.errors import InputError

PROGRAM = Path(__file__).parents[1] / "megatron_cpu.py"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": True, "extra_state": True},
    "tied": {"tied": True, "common": "inside", "groups": 1},
    "per-layer": {"per_layer": True, "groups": 4, "optimizer": True},
    "split-fc1": {"singleton": True, "per_layer": True},
    "tp2": {"tp": 2, "optimizer": True},
    "pp2": {"pp": 2, "layers": 4, "tp": 1},
    "fp8-params": {"optimizer": True, "fp8_params": True},
    "no-args": {"args": False},
}


class Odd:
    """Not a tensor."""


def megatron(options: list[dict[str, Any]]) -> None:
    """Runs megatron-core in a process of its own."""
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(options)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of each kind in made/KIND, the logits beside it; a canary that must never be touched."""
    root = tmp_path_factory.mktemp("megatron")
    canary = {"canary": str(root / "canary")}
    megatron(
        [{"out": str(root / kind), "logits": str(root / f"{kind}.json"), **canary, **o} for kind, o in KINDS.items()]
    )
    (root / "canary").unlink(missing_ok=True)  # megatron-core unpickles what its ranks exchange
    return root


def opened(made: Path, kind: str, **options: Any) -> MegatronWeights:
    weights = open_weights(made / kind, "A", **options)
    assert isinstance(weights, MegatronWeights)
    return weights


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("pp2", "no-args", "fp8-params")])
def test_the_converted_model_computes_what_megatron_computed(made: Path, tmp_path: Path, kind: str) -> None:
    weights = opened(made, kind)
    assert weights.shape.vocab == 110 and weights.shape.tied == KINDS[kind].get("tied", False)
    export_hf(weights, tmp_path / "hf", beside=surroundings(weights, None, "bfloat16").beside)
    theirs = torch.tensor(json.loads((made / f"{kind}.json").read_text()))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ours = model((torch.arange(3, 15) % 110)[None]).logits[0]
    assert torch.allclose(ours, theirs, atol=2e-4), (ours - theirs).abs().max()
    assert not (made / "canary").exists()


def test_pipeline_stages_are_put_together(made: Path) -> None:
    weights = opened(made, "pp2")
    assert weights.shape.layers == 4 and len(weights.tensors) == 4 * 12 + 3
    for name, (_, shape) in weights.tensors.items():
        assert weights.rows(name, 0, shape[0]).shape == shape


def test_every_row_range_is_a_slice_of_the_whole(made: Path) -> None:
    for kind in ("tp2", "split-fc1"):
        weights = opened(made, kind)
        for name, (_, shape) in weights.tensors.items():
            whole = weights.rows(name, 0, shape[0])
            for first, count in ((0, 1), (shape[0] - 1, 1), (shape[0] // 3, shape[0] // 2), (15, 2)):
                assert torch.equal(weights.rows(name, first, count), whole[first : first + count]), name


def test_it_is_what_torch_reads_itself(made: Path) -> None:
    """The fused tensors against torch.distributed.checkpoint, taken apart by hand."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder, weights = find_iteration(made / "tp2", "A"), opened(made, "tp2")
    key = "decoder.layers.self_attention.linear_qkv.weight"
    state = {key: torch.empty(2, 128, 64, dtype=torch.bfloat16)}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    fused = state[key][1].view(2, 4, 16, 64)  # groups; two query heads, one key and one value head; head_dim
    expected = {"q": fused[:, :2].reshape(64, 64), "k": fused[:, 2].reshape(32, 64), "v": fused[:, 3].reshape(32, 64)}
    for letter, rows in expected.items():
        name = f"model.layers.1.self_attn.{letter}_proj.weight"
        assert torch.equal(weights.rows(name, 0, rows.shape[0]), rows), letter


def test_arguments_recipe_and_placeholders(made: Path) -> None:
    for kind in ("plain", "tied"):  # both layouts of common state
        weights = opened(made, kind)
        assert weights.iteration == 7 and weights.checkpoint.arguments["padded_vocab_size"] == 128
        found = surroundings(weights, None, "bfloat16")
        assert json.loads(found.beside.texts["recipe.json"])["name"] == "infir2"
        card = found.beside.texts["README.md"]
        assert "| lr decay style | WSD |" in card and "| step | 7 |" in card and "/somewhere" not in card
        listed = next(note for note in found.notes if "inert placeholders" in note)
        for name in ("megatron_training_elsewhere.Rerun", "megatron_training_elsewhere.Mode", "system"):
            assert name in listed
    assert recipe_of({"bf16": True, "fp8": None}).name == "bf16"  # type: ignore[union-attr]
    assert recipe_of({"fp8": "hybrid", "fp8_recipe": "delayed"}) is None


def test_masters_are_taken_when_the_weights_were_fp8(made: Path) -> None:
    bf16, masters = opened(made, "plain"), opened(made, "fp8-params")
    assert any("float32 masters" in note for note in masters.notes)
    name = "model.layers.0.mlp.up_proj.weight"
    assert bf16.tensors[name][0] == torch.bfloat16 and masters.tensors[name][0] == torch.float32
    found, stored = masters.rows(name, 0, 96), bf16.rows(name, 0, 96)
    assert torch.equal(found, stored.float() * (1 + 2**-12))


def described(arguments: dict[str, Any]) -> MegatronWeights:
    """Weights of two layers, four heads of 16 and two key/value heads, with these args."""
    weights = MegatronWeights.__new__(MegatronWeights)
    weights.path, weights._stored, weights._masters, weights.notes = Path("here"), {}, {}, []
    weights.checkpoint = SimpleNamespace(arguments=arguments)  # type: ignore[assignment]
    sizes = {EMBEDDING: (128, 64), f"{QKV}.weight": (128, 64), f"{PROJ}.weight": (64, 64), f"{FC2}.weight": (64, 96)}
    weights._size = sizes.__getitem__  # type: ignore[method-assign,assignment]
    weights._count_layers = lambda: 2  # type: ignore[method-assign]
    return weights


@pytest.mark.parametrize(
    ("arguments", "vocab"), [({"vocab_size": 152064}, 151936), ({"vocab_size": 151936}, 151936), ({}, 151936)]
)
def test_padding_that_a_script_calls_the_vocabulary_is_cut_off(arguments: dict[str, Any], vocab: int) -> None:
    weights = described(arguments)
    shape = load_preset("1.5b").model.model_dump()
    assert weights._vocabulary(152064, shape, None) == vocab
    assert weights._vocabulary(152064, shape | {"layers": 5}, None) == arguments.get("vocab_size", 152064)


def changed(made: Path, tmp_path: Path, **arguments: Any) -> Path:
    """A copy of the plain checkpoint whose args say something else."""
    folder = copied(made, tmp_path)
    before = plain(DistCheckpoint(folder / "iter_0000007").arguments)
    torch.save({"args": argparse.Namespace(**before | arguments)}, folder / "iter_0000007/common.pt")
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotary_percent", 0.5), ("rotary_interleaved", True), ("use_rope_scaling", True), ("swiglu", False),
        ("normalization", "LayerNorm"), ("apply_layernorm_1p", True), ("position_embedding_type", "learned_absolute"),
        ("rotary_seq_len_interpolation_factor", 4), ("window_size", [128, 0]), ("qk_l2_norm", True),
        ("num_experts", 8), ("add_bias_linear", True), ("untie_embeddings_and_output_weights", True),
    ],
)  # fmt: skip
def test_arguments_of_another_model_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} = ") as caught:
        described({name: value})._shape(None)
    shown = tuple(value) if isinstance(value, list) else value
    assert f"{name} = {shown}" in caught.value.what and caught.value.exit_code == 3


def test_arguments_that_say_the_same_are_taken(made: Path, tmp_path: Path, run_cli: Any) -> None:
    same = {"rotary_percent": 1, "rotary_interleaved": False, "window_size": None, "position_embedding_type": "rope"}
    folder = changed(made, tmp_path, **same)
    assert open_weights(folder, "A").shape == opened(made, "plain").shape
    shutil.rmtree(folder)
    for name, value, words in (("use_rope_scaling", True, "= True"), ("num_attention_heads", "2", "= '2'")):
        done = run_cli("convert", "to-hf", changed(made, tmp_path, **{name: value}), tmp_path / "out")
        assert done.returncode == 3 and f"{name} {words}" in done.stderr and not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "copy")


def test_without_arguments_an_origin_is_needed(made: Path) -> None:
    with pytest.raises(InputError, match="number of heads is not known") as caught:
        opened(made, "no-args")
    assert "--origin" in caught.value.hint
    shape = opened(made, "plain").shape
    weights = opened(made, "no-args", origin=shape)
    assert weights.shape == shape
    with pytest.raises(InputError, match="the origin says head_dim = 32|the origin says heads"):
        opened(made, "plain", origin=shape.model_copy(update={"heads": 2, "head_dim": 32}))
    with pytest.raises(InputError, match="the origin has 130 words"):
        opened(made, "no-args", origin=shape.model_copy(update={"vocab": 130}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_loads_what_is_written_here(tmp_path: Path, tied: bool, tp: int) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = write_model(tmp_path / "hf", tied=tied, sizes=sizes, vocab=110)
    export_megatron(HFWeights(tmp_path / "hf"), tmp_path / "mc")
    assert (tmp_path / "mc/latest_checkpointed_iteration.txt").read_text() == "release"
    options = {"load": str(tmp_path / "mc/release"), "tied": tied, "tp": tp, "logits": str(tmp_path / "l.json")}
    megatron([options])
    theirs = torch.tensor(json.loads((tmp_path / "l.json").read_text()))
    ours = model.float()((torch.arange(3, 15) % 110)[None]).logits[0]
    assert torch.allclose(ours, theirs, atol=2e-4), (ours - theirs).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
def test_hf_to_megatron_to_hf_is_bit_for_bit(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    write_model(tmp_path / "hf", dtype=dtype, tied=tied, shard="400KB")
    source = HFWeights(tmp_path / "hf")
    export_megatron(source, tmp_path / "mc")
    back = open_weights(tmp_path / "mc", "A")
    assert compare(source, back)["equal"]
    export_hf(back, tmp_path / "again", str(dtype).removeprefix("torch."))
    before = {n: t for file in (tmp_path / "hf").glob("*.safetensors") for n, t in load_file(file).items()}
    after = load_file(tmp_path / "again/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)


@pytest.mark.parametrize(
    ("padded", "arguments", "vocab"),
    [
        (160000, {"vocab_size": 160000}, 160000),
        (160000, {}, 160000),
        (152576, {"vocab_size": 152500}, 152500),  # no multiple of Megatron's, so no padded size
        (152064, {"vocab_size": 151665}, 151936),  # the words of the tokenizer
        (155648, {"make_vocab_size_divisible_by": 1024, "tensor_model_parallel_size": 4}, 151936),
        (155648, {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 4}, 155648),
    ],
)
def test_only_padding_is_cut_off(padded: int, arguments: dict[str, Any], vocab: int) -> None:
    weights = described(arguments)
    assert weights._vocabulary(padded, load_preset("1.5b").model.model_dump(), None) == vocab
    assert any(str(vocab) in note for note in weights.notes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_attention_heads", value) for value in ("2", 1000, -2, 3, Inert(), True, 2.0)),
        *(("rotary_base", value) for value in ("x", -1, float("nan"), float("inf"), Inert())),
        *(("norm_epsilon", value) for value in ("a", 0, [1])),
        *(("max_position_embeddings", value) for value in ("a", -1)),
        *(("vocab_size", value) for value in ("a", True, 0)),
        ("kv_channels", 32), ("num_query_groups", 4), ("make_vocab_size_divisible_by", "a"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(name: str, value: Any) -> None:
    right = {"num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": True, "kv_channels": 16}
    assert described(right)._shape(None).kv_heads == 2
    with pytest.raises(InputError, match=name) as caught:
        described(right | {name: value})._shape(None)
    assert caught.value.hint and caught.value.exit_code == 3


def test_wrong_tensors_are_named() -> None:
    weights = described({"num_attention_heads": 4})
    sizes = weights._size
    weights._size = lambda name: (128,) if name == EMBEDDING else sizes(name)  # type: ignore[method-assign]
    with pytest.raises(InputError, match=rf"'{EMBEDDING}' has size \[128\], expected two dimensions"):
        weights._shape(None)


@pytest.mark.parametrize("keep", [0, 2, 4])
def test_a_damaged_tensor_record_is_named(tmp_path: Path, keep: int) -> None:
    torch.save(torch.ones(4, 6), tmp_path / "x")
    archive = Archive(tmp_path / "x")
    before = archive.value.args
    archive.value.args = before[:keep] if keep < 4 else (*before[:2], (4, "6"), *before[3:])
    with pytest.raises(InputError, match="the weight 'x' is damaged"):
        archive.tensor(archive.value, "x")


def copied(made: Path, tmp_path: Path, kind: str = "plain") -> Path:
    return Path(shutil.copytree(made / kind, tmp_path / "copy"))


def test_damage_is_named_and_leaves_nothing(made: Path, tmp_path: Path) -> None:
    def refuses(words: str) -> InputError:
        with pytest.raises(InputError, match=words) as caught:
            weights = open_weights(tmp_path / "copy", "A")
            export_hf(weights, tmp_path / "out")
        assert not list(tmp_path.glob("out*"))
        shutil.rmtree(tmp_path / "copy")
        return caught.value

    folder = copied(made, tmp_path) / "iter_0000007"
    (folder / ".metadata").unlink()
    refuses("it has no .metadata")
    folder = copied(made, tmp_path) / "iter_0000007"
    (folder / "__0_1.distcp").unlink()
    refuses("the file cannot be read")
    folder = copied(made, tmp_path) / "iter_0000007"
    for file in folder.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refuses("truncated|no archive of torch.save|cut off")
    folder = copied(made, tmp_path) / "iter_0000007"
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "--ckpt-format torch_dist" in refuses("format is 'zarr'").hint
    folder = copied(made, tmp_path) / "iter_0000007"
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-40])
    refuses("the pickle cannot be read")
    (copied(made, tmp_path) / "latest_checkpointed_iteration.txt").write_text("99")
    refuses("says '99'")
    for text in (b"\xff9", "\u00b2".encode(), b"9" * 5000):
        (copied(made, tmp_path) / "latest_checkpointed_iteration.txt").write_bytes(text)
        refuses("and there is no such folder")
    name = b"decoder.layers.mlp.linear_fc2.weight"
    file = copied(made, tmp_path) / "iter_0000007/.metadata"
    file.write_bytes(file.read_bytes().replace(name, name.replace(b"fc2", b"fc3")))
    refuses("has no weight 'decoder.layers.mlp.linear_fc2.weight'")
    name = b"common/data.pkl"  # as the central directory of the archive calls it
    for change in (b"common/data\xffpkl", b"common/data.pkx"):
        file = copied(made, tmp_path) / "iter_0000007/common.pt"
        file.write_bytes(file.read_bytes().replace(name, change, 1))
        refuses("no archive of torch.save at byte 0")


@pytest.mark.parametrize(
    ("inside", "given"),
    [
        (".", "{root}"), (".", "{root}/iter_0000100"), (".", "{root}/iter_0000100/mp_rank_00"),
        (".", "iter_0000100/mp_rank_00"), ("iter_0000100", "mp_rank_00"), ("iter_0000100", "."),
        ("iter_0000100/mp_rank_00", "."), ("iter_0000100/mp_rank_00", ".."), ("iter_0000100", ".."),
    ],
)  # fmt: skip
def test_the_older_format_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, given: str
) -> None:
    root = tmp_path / "a run"
    (root / "iter_0000100/mp_rank_00").mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    monkeypatch.chdir(root / inside)
    with pytest.raises(InputError, match="older format") as caught:
        open_weights(Path(given.format(root=root)), "A")
    assert f"--load '{root}' --ckpt-convert-format torch_dist" in caught.value.hint


def test_nothing_that_a_pickle_names_is_run(tmp_path: Path) -> None:
    import pickle

    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> Any:
            return eval, (f"open({str(canary)!r}, 'w')",)

    found = read_pickle(pickle.dumps({"x": Evil(), "y": [1, {2}, torch.bfloat16]}), "here")
    assert isinstance(found["x"], Inert) and found["x"].origin == "builtins.eval"
    assert found["y"] == [1, {2}, torch.bfloat16] and not canary.exists()
    for text in (b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.", b"\x80\x04garbage", b"", b"\x82\x01."):
        try:
            assert isinstance(read_pickle(text, "here"), Inert)
        except InputError as error:
            assert "the pickle" in error.what
    assert not canary.exists()


def test_a_weight_bf16as_an_object_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    checkpoint = DistCheckpoint(find_iteration(made / "plain", "A"))
    assert any(name.endswith("linear_qkv._extra_state/shard_0_2") for name in checkpoint.objects)
    torch.save(Odd(), tmp_path / "odd")
    archive = Archive(tmp_path / "odd")
    with pytest.raises(InputError, match="the weight 'x' is stored as .*Odd, which is not read"):
        archive.tensor(archive.value, "x")
    torch.save(torch.ones(4, 6).T, tmp_path / "odd")
    archive = Archive(tmp_path / "odd")
    with pytest.raises(InputError, match="not stored row by row"):
        archive.tensor(archive.value, "x")
