"""`infir2 sft` as a user types it: two stages, resuming inside an epoch, what becomes of bad data, the export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import write_chats
from conftest import metrics
from tiny_bpe import train_bpe

from infir2_core.data.byte_files import BYTE_TEMPLATE
from infir2_core.train.checkpoint import CheckpointStore

Tune = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = ["--size", "tiny", "--recipe", "bf16", "--epochs", 2, "--global-batch", 4, "--row-tokens", 512]
SMALL += ["--max-tokens", 512, "--eval-share", 0.1, "--eval-every", 5, "--answers", 2, "--answer-tokens", 8]
GOOD = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


@pytest.fixture
def tune(run_cli: Callable[..., Any], tmp_path: Path) -> Tune:
    """`tune("--stage", 1, name="a")`: a short run over 20 conversations, 18 of them trained on."""
    data = write_chats(tmp_path / "chats.jsonl", 20)

    def start(*options: object, name: str = "run", **keywords: Any) -> subprocess.CompletedProcess[str]:
        own = ["--runs", tmp_path / "runs", "--name", name, "--device", "cpu"]
        own += [] if "--data" in options else ["--data", data]
        own += [] if "--stage" in options else ["--stage", 1, "--from-scratch"]
        done: subprocess.CompletedProcess[str] = run_cli("sft", *SMALL, *own, *options, cwd=tmp_path, **keywords)
        return done

    return start


def newest(run: Path) -> Any:
    store = CheckpointStore(run / "checkpoints")
    path, damaged = store.newest()
    assert path is not None and not damaged
    return store.load(path)


def answers(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def same(a: Path, b: Path) -> None:
    """The two runs left the same bits."""
    assert metrics(a) == metrics(b) and metrics(a, "eval") == metrics(b, "eval") and answers(a) == answers(b)
    one, other = newest(a), newest(b)
    assert (one.step, one.state) == (other.step, other.state) and one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


def test_from_pre_training_through_both_stages_to_a_model_that_others_read(
    tune: Tune, train: Tune, run_cli: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, GenerationConfig, Qwen2ForCausalLM

    assert train("--steps", 6, "--recipe", "bf16", "--eval-every", 0, name="base").returncode == 0
    early = tune("--stage", 2, name="two")
    assert early.returncode == 3 and "no run of stage 1" in early.stderr
    one = tune("--stage", 1, name="one")
    assert one.returncode == 0, one.stderr
    assert "starts from base, step 6 of 6: the newest run of cpt" in one.stdout
    assert "20 samples of 20 records" in one.stdout and "chats.jsonl: messages" in one.stdout
    run = tmp_path / "runs" / "one"
    steps, evals = metrics(run), metrics(run, "eval")
    assert [line["step"] for line in steps] == list(range(1, 10)), "18 samples twice, in batches of 4"
    assert [line["step"] for line in evals] == [0, 5, 9] and evals[-1]["loss"] < evals[0]["loss"]
    assert 0 < steps[0]["trained_share"] < 1 and 0 <= steps[0]["padding_share"] < 0.5
    assert [(line["step"], line["kind"]) for line in answers(run)] == [(s, "sample") for s in (0, 0, 5, 5, 9, 9)]
    assert answers(run)[0]["prompt"].endswith("<|im_start|>assistant\n")
    assert newest(run).state["position"]["samples"] == 36
    again = tune("--stage", 1, name="one")
    assert again.returncode == 0 and "resuming one at step 9" in again.stdout
    two = tune("--stage", 2, "--prompt", "Who are you?", name="two")
    assert two.returncode == 0 and "starts from one, step 9 of 9: the newest run of sft-1" in two.stdout, two.stderr
    assert {line["prompt"] for line in answers(tmp_path / "runs" / "two")} == {
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    }
    shown = json.loads(run_cli("runs", "show", "two", "--json", cwd=tmp_path).stdout)
    assert (shown["stage"], shown["status"], shown["steps_done"], shown["steps_planned"]) == ("sft-2", "finished", 9, 9)
    assert shown["settings"]["sft.epochs"] == 2 and not any(key.startswith("cpt") for key in shown["settings"])
    assert run_cli("runs", "show", "two", "--html", cwd=tmp_path, cold=True).returncode == 0
    assert run_cli("runs", "compare", "one", "two", cwd=tmp_path, cold=True).returncode == 0
    made = run_cli("convert", "to-hf", "runs/two", "hf", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "hf")
    assert (tokenizer.eos_token_id, model.config.eos_token_id) == (258, 258)
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == [258, 256]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert "| stage | sft, stage 2 |" in (tmp_path / "hf/README.md").read_text()
    command = ["generate", "--prompt", "a", "--max-new-tokens", 4, "--json"]
    ours, exported = (json.loads(run_cli(*command, ref, cwd=tmp_path).stdout) for ref in ("two", "hf"))
    assert ours["generations"][0]["tokens"] == exported["generations"][0]["tokens"]
    assert ours["generations"][0]["prompt_tokens"] == tokenizer(text)["input_ids"]


def test_the_tokenizer_of_another_folder_goes_into_the_export(tune: Tune, run_cli: Any, tmp_path: Path) -> None:
    train_bpe(tmp_path / "instruct", 300, chat_template=BYTE_TEMPLATE)
    refused = tune("--tokenizer", "instruct")
    assert refused.returncode == 3 and "the tokenizer has 300 ids, the model's vocabulary 260" in refused.stderr
    assert "--tokenizer" in refused.stderr and not (tmp_path / "runs" / "run").exists()
    from infir2_core.config.presets import load_preset
    from infir2_core.model.decoder import Decoder
    from infir2_core.model.hf import save_hf
    from infir2_core.precision.recipe import load_recipe

    model = Decoder(load_preset("tiny").model.model_copy(update={"vocab": 320}), load_recipe("fp32"))
    model.initialise(0.02, seed=3)
    save_hf(model, tmp_path / "base")
    train_bpe(tmp_path / "base", 300)
    bare = tune("--stage", 1, "--from", "base")
    assert bare.returncode == 3 and "no chat template" in bare.stderr and "Instruct" in bare.stderr
    options = ["--stage", 1, "--from", "base", "--tokenizer", "instruct", "--skip-load-check", "--steps", 2]
    done = tune(*options)
    assert done.returncode == 0, done.stderr
    made = run_cli("convert", "to-hf", "runs/run", "hf", cwd=tmp_path)
    assert made.returncode == 0 and "those of the training" in made.stdout, made.stderr
    config = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>" and config["chat_template"] == BYTE_TEMPLATE
    turn_end = json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"]
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"] == turn_end == 2
    assert json.loads((tmp_path / "base/tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize("point,step", [("save:after-rename", 3), ("save:after-tensors", 6)])
def test_a_killed_run_resumes_inside_an_epoch_with_the_same_bits(
    tune: Tune, tmp_path: Path, point: str, step: int
) -> None:
    options = ["--save-every", 3, "--recipe", "fp8-delayed"]
    assert tune(*options, name="whole").returncode == 0
    assert tune(*options, name="killed", env={"INFIR2_FAULT": f"kill:{point}@step={step}"}).returncode == -9
    resumed = tune(*options, name="killed")
    assert resumed.returncode == 0 and "resuming killed at step 3" in resumed.stdout, resumed.stderr
    same(tmp_path / "runs" / "whole", tmp_path / "runs" / "killed")


def test_a_requested_stop_resumes_with_the_same_bits(tune: Tune, tmp_path: Path) -> None:
    options = ["--epochs", 12, "--save-every", 1000]
    assert tune(*options, name="whole").returncode == 0
    root, run = str(Path(__file__).resolve().parents[2]), tmp_path / "runs" / "stopped"
    own = ["--stage", 1, "--from-scratch", "--data", "chats.jsonl", "--runs", "runs", "--name", "stopped"]
    command = [sys.executable, "-m", "infir2_cli", "sft", *map(str, [*SMALL, *own, "--device", "cpu", *options])]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 4:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    assert tune(*options, name="stopped").returncode == 0
    same(tmp_path / "runs" / "whole", run)


def test_two_ranks_train_as_one_does(tune: Tune, tmp_path: Path) -> None:
    options = ["--recipe", "fp32", "--epochs", 1, "--eps", 1e-2]
    assert tune(*options, name="one").returncode == 0
    done = tune(*options, "--ranks", 2, name="two")
    assert done.returncode == 0, done.stderr
    for kind in ("step", "eval"):
        one, two = (metrics(tmp_path / "runs" / name, kind) for name in ("one", "two"))
        assert [line["step"] for line in one] == [line["step"] for line in two]
        assert [line["tokens"] for line in one] == [line["tokens"] for line in two]
        for a, b in zip(one, two, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_generation_and_evaluation_do_not_disturb_training(tune: Tune, tmp_path: Path) -> None:
    assert tune("--recipe", "fp8-delayed", name="watched").returncode == 0
    assert tune("--recipe", "fp8-delayed", "--eval-every", 0, name="alone").returncode == 0
    watched, alone = (tmp_path / "runs" / name for name in ("watched", "alone"))
    assert metrics(watched) == metrics(alone) and not (alone / "samples.jsonl").exists()
    a, b = newest(watched).tensors, newest(alone).tensors
    # The last evaluation notes the amax of weights, which the next step would have done.
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items() if not name.endswith(".w.amax_now"))


def test_a_plan_leaves_no_run(tune: Tune, tmp_path: Path) -> None:
    done = tune("--dry-run")
    assert done.returncode == 0 and not (tmp_path / "runs" / "run").exists()
    for words in ("2 epochs of 18 (2 held out)", "9 steps of", "byte", "trained on"):
        assert words in done.stdout, done.stdout
    plan = json.loads(tune("--dry-run", "--json").stdout)
    assert plan["config"]["chat"]["turn_end"] == 258 and plan["config"]["sft"]["steps"] == 9
    assert plan["plan"]["tokens"] == 2 * plan["config"]["chat"]["tokens"]


def test_other_settings_and_other_data_under_a_name_are_refused(tune: Tune, tmp_path: Path) -> None:
    assert tune("--steps", 1).returncode == 0
    other = tune("--steps", 1, "--lr", 1e-4)
    assert other.returncode == 3 and "sft.lr: 0.001 -> 0.0001" in other.stderr
    write_chats(tmp_path / "chats.jsonl", 20, seed=5)
    changed = tune("--steps", 1)
    assert changed.returncode == 3 and "data.0.content" in changed.stderr
    write_chats(tmp_path / "renamed.jsonl", 20)
    renamed = tune("--steps", 1, "--data", "renamed.jsonl")
    assert renamed.returncode == 3 and "data.0.prefix" in renamed.stderr
    (tmp_path / "elsewhere").mkdir()
    write_chats(tmp_path / "elsewhere" / "chats.jsonl", 20)
    moved = tune("--steps", 1, "--data", "elsewhere/chats.jsonl")
    assert moved.returncode == 0 and "resuming run at step 1" in moved.stdout, moved.stderr


def said(*turns: tuple[str, str], **extra: Any) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns], **extra})


BAD = {
    "not JSON": '{"messages": oops}',
    "no assistant turn": said(("user", "?")),
    "unknown role": said(("user", "?"), ("robot", "!")),
    "empty content": said(("user", ""), ("assistant", "!")),
    "template fails": said(("user", "fail"), ("assistant", "!")),
    "repeated id": said(("user", "?"), ("assistant", "!"), id="a"),
}


def test_bad_samples_are_counted_named_and_above_a_share_refused(tune: Tune, tmp_path: Path) -> None:
    fails = "{% if messages[0].content == 'fail' %}{{ raise_exception('told to fail') }}{% endif %}" + BYTE_TEMPLATE
    train_bpe(tmp_path / "tok", 259, chat_template=fails, text="abc")
    lines = [said(("user", "first"), ("assistant", "!"), id="a"), *BAD.values(), *[json.dumps(GOOD)] * 9]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    options = ["--data", "bad.jsonl", "--tokenizer", "tok", "--steps", 1, "--dry-run"]
    refused = tune(*options)
    assert refused.returncode == 3 and "6 of 16 records are bad, more than 1.00%" in refused.stderr, refused.stderr
    for number, kind in enumerate(BAD, 2):
        assert f"{kind} (1), bad.jsonl, line {number}" in refused.stderr.replace(str(tmp_path) + "/", ""), kind
    taken = tune(*options, "--max-bad-share", 0.5)
    assert taken.returncode == 0, taken.stderr
    for kind in BAD:
        assert f"left out, {kind}: 1 (the first: " in taken.stdout, taken.stdout


@pytest.mark.parametrize(
    "options,words",
    [
        (["--data", "missing.jsonl"], ["missing.jsonl"]),
        (["--data", "empty.jsonl"], ["no records"]),
        (["--data", "one.jsonl"], ["cannot be split"]),
        (["--data", "chats.jsonl", "--max-tokens", 8], ["no sample is left", "longer than 8 tokens"]),
        (["--max-tokens", 1024], ["max_tokens (1024) is above row_tokens (512)", "--max-tokens"]),
        (["--tokenizer", "nowhere"], ["no such tokenizer"]),
        (["--stage", 1, "--from", "nowhere"], ["'nowhere' is no folder, run or hub id", "--from"]),
        (["--eval-share", 1], ["eval_share must be below 1"]),
        (["--data", ""], ["--data is empty", "hint:"]),
        (["--prompt", ""], ["the prompt is empty", "hint:"]),
        (["--prompt", "x" * 3000], ["the prompt has 3019 tokens, 2040 leave room"]),
        (["--device", "cuda"], ["CUDA"]),
    ],
)
def test_bad_input(tune: Tune, tmp_path: Path, options: list[object], words: list[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "one.jsonl").write_text(json.dumps(GOOD) + "\n")
    done = tune(*options)
    assert done.returncode in (3, 4) and "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_long_samples_are_dropped_or_cut_and_counted(tune: Tune, tmp_path: Path) -> None:
    long = said(("user", "?"), ("assistant", "a" * 600))
    (tmp_path / "long.jsonl").write_text("\n".join([*[json.dumps(GOOD)] * 5, long]) + "\n")
    dropped = tune("--data", "long.jsonl", "--dry-run")
    assert "too long: 1 dropped, 0 truncated (the first: " in dropped.stdout and "line 6" in dropped.stdout
    cut = tune("--data", "long.jsonl", "--dry-run", "--too-long", "truncate", "--eval-share", 0)
    assert "too long: 0 dropped, 1 truncated" in cut.stdout and "epochs of 6 (0 held out)" in cut.stdout
