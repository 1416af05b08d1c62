"""A run as a user goes on with it: exported, compared, cast, checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hf_models import write_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

Cli = Callable[..., Any]


def test_a_run_becomes_an_fp8_folder_as_typed(run_cli: Cli, train: Callable[..., Any], tmp_path: Path) -> None:
    assert train("--steps", 4, "--eval-every", 2, name="mine").returncode == 0
    done = run_cli("cast-fp8", "--device", "cpu", cwd=tmp_path, cold=True)
    assert done.returncode == 0, done.stderr
    assert "the run written to last" in done.stdout and "as recipe infir2 trained it" in done.stdout
    export = tmp_path / "runs/mine/hf/step-00000004"
    assert [path.name for path in export.parent.iterdir()] == [f"{export.name}-fp8"]  # nothing made on the way is left
    assert run_cli("convert", "to-hf", "mine", cwd=tmp_path).returncode == 0
    for folder, kind in ((export, "bfloat16"), (Path(f"{export}-fp8"), "fp8")):
        done = run_cli("convert", "verify", folder, "--json", cwd=tmp_path, cold=True)
        assert done.returncode == 0 and json.loads(done.stdout)["kind"] == kind
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert torch.isfinite(model(torch.arange(9)[None]).logits).all()
    card = (export / "README.md").read_text()
    logged = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    held_out = [line["loss"] for line in logged if line["kind"] == "eval"][-1]
    assert f"| held-out loss (nats a token) | {held_out:.4f} |" in card
    done = run_cli("convert", "check", "mine", export, cwd=tmp_path, cold=True)
    assert done.returncode == 0 and "rounded to the narrower" in done.stdout and "equal: " in done.stdout
    done = run_cli("convert", "to-hf", "mine", cwd=tmp_path, cold=True)
    assert done.returncode == 3 and "exists already" in done.stderr
    done = run_cli("convert", "to-hf", "mine", "other", "--dtype", "float32", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["dtype"] == "float32"
    done = run_cli("convert", "check", "other", "mine", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["dtypes"] == []


def test_training_goes_on_from_a_converted_model(run_cli: Cli, train: Callable[..., Any], tmp_path: Path) -> None:
    assert train("--steps", 2, name="parent").returncode == 0
    assert run_cli("convert", "to-hf", "parent", "hf", cwd=tmp_path).returncode == 0
    done = run_cli("convert", "from-hf", "hf", "native", cwd=tmp_path, cold=True)
    assert done.returncode == 0, done.stderr
    done = run_cli("convert", "check", "hf", "native", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    done = train("--steps", 2, "--from", "native", "--skip-load-check", "--json", name="child")
    assert done.returncode == 0, done.stderr
    done = run_cli("convert", "check", "native", "child", cwd=tmp_path)
    assert done.returncode == 3 and "the first difference is in model.embed_tokens.weight" in done.stdout


def test_wrong_words(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    for words, code, expected in (
        (("to-hf", "hf"), 3, "a Hugging Face folder already"),
        (("to-hf", "hf", "out", "--dtype", "fp8"), 2, "no dtype 'fp8'"),
        (("from-hf", "hf", "out", "--layout", "megatorn"), 2, "no layout 'megatorn'"),
        (("from-hf", "hf", "hf"), 3, "over the source"),
        (("check", "hf", "nothing"), 3, "'nothing' is neither a folder, nor a hub id, nor a run"),
    ):
        done = run_cli("convert", *words, cwd=tmp_path)
        assert done.returncode == code and expected in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_megatron_there_and_back(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", vocab=300)
    numel = sum(tensor.numel() for tensor in load_file(tmp_path / "hf/model.safetensors").values())
    for layout, itemsize in (("megatron", 2), ("native", 4)):
        done = run_cli("convert", "from-hf", "hf", "mc", "--layout", layout, "--dry-run", "--json", cwd=tmp_path)
        said = json.loads(done.stdout)
        assert (said["written"], said["layout"], said["bytes"]) == (False, layout, itemsize * numel)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    done = run_cli("convert", "from-hf", "hf", "mc", "--layout", "megatron", "--json", cwd=tmp_path, cold=True)
    assert done.returncode == 0 and json.loads(done.stdout)["written"], done.stderr
    done = run_cli("convert", "to-hf", "mc", "--origin", "hf", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and "mc/release-hf" in done.stdout.replace("\n", "") and "nothing was" in done.stdout
    assert not (tmp_path / "mc/release-hf").exists()
    assert run_cli("convert", "check", "hf", "mc", cwd=tmp_path).returncode == 0
    done = run_cli("convert", "to-hf", "mc", "--origin", "hf", "--json", cwd=tmp_path, cold=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["out"] == str(tmp_path / "mc/release-hf")
    done = run_cli("convert", "check", "mc/release-hf", "hf", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["dtypes"] == []
    for name in ("merges.txt", "chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "mc/release-hf" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes(), name
    (tmp_path / "old/iter_0000005/mp_rank_00").mkdir(parents=True)
    done = run_cli("convert", "to-hf", "old/iter_0000005", "out", cwd=tmp_path)
    assert done.returncode == 3 and "--ckpt-convert-format torch_dist" in done.stderr


def test_hints(run_cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1, shard="400KB")
    assert run_cli("convert", "from-hf", "hf", "mc", "--layout", "megatron", cwd=tmp_path).returncode == 0
    piece = next((tmp_path / "mc").rglob("*.distcp"))
    piece.write_bytes(piece.read_bytes()[: piece.stat().st_size // 2])
    index = tmp_path / "hf/model.safetensors.index.json"
    content = json.loads(index.read_text())
    home = content["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(content))
    (tmp_path / "empty").mkdir()
    for words, expected in (
        (("convert", "check", "hf-nope", "hf"), "check the path"),
        (("init", "new", "--from-megatron", "nothere"), "there is no such path"),
        (("cast-fp8", "hf"), f"'model.norm.weight' is in {home}, the index names it not at all"),
        (("convert", "from-hf", "empty", "out"), "it has no config.json"),
        (("convert", "to-hf", "mc", "out"), "truncated"),
    ):
        done = run_cli(*words, cwd=tmp_path)
        assert done.returncode == 3 and expected in done.stderr, done.stderr
        assert "hint:" in done.stderr and "infir2 cpt" not in done.stderr, done.stderr
