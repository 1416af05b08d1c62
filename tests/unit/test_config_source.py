"""What `--from` and `--load` may name, told apart by what a folder holds; the hub without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infir2_core.config.hf_config import shape_to_hf
from infir2_core.config.presets import load_preset
from infir2_core.config.runfile import write_config
from infir2_core.config.schema import SIZES, RunConfig, Source
from infir2_core.config.source import Weights, check_size, find_weights, matching_size
from infir2_core.errors import InputError

TINY = load_preset("tiny")


def hf_folder(path: Path, size: str = "tiny", weights: bool = True, **changes: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(shape_to_hf(load_preset(size).model) | changes))
    if weights:
        (path / "model.safetensors").write_bytes(b"")
    return path


def checkpoint(run: Path, step: int, model: dict[str, Any] | None = None) -> Path:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    shape = TINY.model.model_dump() if model is None else model
    (folder / "manifest.json").write_text(json.dumps({"step": step, "state": {"engine": {"model": shape}}}))
    return folder


def run_folder(path: Path, *steps: int) -> Path:
    (path / "checkpoints").mkdir(parents=True)
    source = Source(kind="scratch")
    config = RunConfig(name="r", runs="/x", size="tiny", model=TINY.model, source=source, data=[], cpt=TINY.cpt)
    write_config(config, path / "config.toml")
    for step in steps:
        checkpoint(path, step)
    return path


def find(reference: str, base: Path, **options: Any) -> Weights:
    return find_weights(reference, base, base / "runs", "--from", **options)


def refused(reference: str, base: Path, *words: str, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        find(reference, base, **options)
    assert caught.value.exit_code == 3
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    hf_folder(tmp_path / "hf", rope_theta=5e5, rope_parameters=None)
    for reference in ("hf", "./hf/", str(tmp_path / "hf")):
        found = find(reference, tmp_path)
        assert (found.kind, found.path, found.run) == ("hf", tmp_path / "hf", None)
        assert found.shape == TINY.model.model_copy(update={"rope_base": 5e5})
        assert found.config == tmp_path / "hf" / "config.json"


def test_a_checkpoint_a_run_and_a_name(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "runs" / "mine", 9, 100, 20)
    (run / "checkpoints" / "step-00000300").mkdir()  # half-written: no manifest
    (run / "checkpoints" / "step-00000400.tmp").mkdir()
    for reference in ("mine", "runs/mine", str(run), "runs/mine/checkpoints/step-00000100"):
        found = find(reference, tmp_path)
        assert found.kind == "checkpoint" and found.shape == TINY.model
        assert found.path == run / "checkpoints" / "step-00000100" and found.step == 100
        assert found.run is not None and found.run.cpt == TINY.cpt
        assert found.config == run / "config.toml"


def test_a_checkpoint_taken_out_of_its_run_still_says_what_it_is(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 5)
    moved = tmp_path / "elsewhere" / "kept" / "here"
    moved.parent.mkdir(parents=True)
    (run / "checkpoints" / "step-00000005").rename(moved)
    found = find(str(moved), tmp_path)
    assert found.run is None and found.shape == TINY.model and found.config == moved / "manifest.json"


def test_what_cannot_be_used(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "mine", 1)
    run_folder(tmp_path / "fresh")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    hf_folder(tmp_path / "bare", weights=False)
    hf_folder(tmp_path / "pickled", weights=False)
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    for name, content in (("nojson", "{"), ("list", "[]"), ("other", '{"model_type": "llama"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    checkpoint(tmp_path / "damaged", 1, {"layers": 3})
    refused("mien", tmp_path, "'mien' is no folder, run or hub id", "Did you mean 'mine'?")
    refused("absent", tmp_path / "empty", "'absent' is no folder", "Qwen/Qwen2.5-1.5B")
    refused("file", tmp_path, "'file' is a file")
    refused("empty", tmp_path, "no weights here", "config.json")
    refused("fresh", tmp_path, "no complete checkpoint", "fresh/checkpoints")
    refused("bare", tmp_path, "no safetensors weights", "other weights: none")
    refused("pickled", tmp_path, "pytorch_model.bin", "convert with transformers")
    refused("nojson", tmp_path, "config.json cannot be read")
    refused("list", tmp_path, "not an object")
    refused("other", tmp_path, "'llama'", "qwen2")
    refused("damaged/checkpoints/step-00000001", tmp_path, "does not say what model it holds", "manifest.json")


def test_sizes_are_recognised_and_contradictions_name_both_numbers(tmp_path: Path) -> None:
    for size in SIZES:
        found = find(str(hf_folder(tmp_path / size, size)), tmp_path)
        assert matching_size(found.shape) == size
        check_size(size, found, "--size")
    with pytest.raises(InputError) as caught:
        check_size("7b", find("0.5b", tmp_path), "--size")
    error = caught.value
    assert error.exit_code == 3 and error.hint == "--size 0.5b"
    assert "layers is 28 for 7b and 24 in the weights (num_hidden_layers)" in error.what
    assert "hidden is 3584 for 7b and 896 in the weights (hidden_size)" in error.what
    assert error.where == f"--size: {tmp_path / '0.5b' / 'config.json'}"
    odd = find(str(hf_folder(tmp_path / "odd", "tiny", num_hidden_layers=4)), tmp_path)
    assert matching_size(odd.shape) is None
    with pytest.raises(InputError, match="layers is 3 for tiny and 4") as caught:
        check_size("tiny", odd, "--size")
    assert "none of the sizes" in caught.value.hint


def test_variants_of_a_size_agree_with_it(tmp_path: Path) -> None:
    changes = {"max_position_embeddings": 4096, "vocab_size": 300, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    found = find(str(hf_folder(tmp_path / "math", "1.5b", **changes)), tmp_path)
    check_size("1.5b", found, "--size")
    assert (found.shape.max_positions, found.shape.vocab, found.shape.norm_eps) == (4096, 300, 1e-5)


def test_a_hub_id_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    error = refused("nobody/nothing", tmp_path, "no folder 'nobody/nothing' here", "cannot be reached")
    assert "give its folder" in error.hint


def test_a_hub_model_is_checked_before_its_weights_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, asked = hf_folder(tmp_path / "cache", weights=False), []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        if "*.safetensors" in allow_patterns:
            (snapshot / "model.safetensors").write_bytes(b"")
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find("owner/model", tmp_path, download=False).shape == TINY.model
    assert asked == [("owner/model", ["config.json"])]
    assert find("owner/model", tmp_path).path == snapshot
    assert [patterns == ["config.json"] for _, patterns in asked] == [True, True, False]
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    refused("owner/model", tmp_path, "'llama'")
    assert len(asked) == 4, "no weights of a model that cannot be used"


@pytest.mark.parametrize(
    ("kind", "words"),
    [("RepositoryNotFoundError", "no such model on the hub"), ("GatedRepoError", "asks for an agreement")],
)
def test_what_the_hub_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str) -> None:
    import httpx
    from huggingface_hub import errors

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
        raise getattr(errors, kind)("refused", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    refused("owner/model", tmp_path, words)
