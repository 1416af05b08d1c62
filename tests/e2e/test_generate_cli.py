"""`infir2 generate` as a user types it: against transformers, from a run, and with everything that can be wrong."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import edit_config, write_model
from tiny_bpe import train_bpe
from transformers import AutoModelForCausalLM, AutoTokenizer

from infir2_core.train.manifest import seal

Cli = Callable[..., Any]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPTS = ["def f(x):", "日本語 quick", "the", "return x # fox"]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "hf"
    sizes = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_model(folder, tied=True, dtype=torch.float32, sizes=sizes | {"initializer_range": 0.2}, vocab=420)
    (folder / "chat_template.jinja").unlink()
    train_bpe(folder, chat_template=TEMPLATE)
    return folder


def theirs(folder: Path, ids: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = torch.tensor([ids])
    made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False)
    return made[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def generated(done: Any) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["generations"]  # type: ignore[no-any-return]


def test_tokens_equal_those_of_transformers_and_a_pipe_gets_the_text(hf: Path, run_cli: Cli, tmp_path: Path) -> None:
    given = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    common = (hf, *given, "--recipe", "fp32", "--max-new-tokens", 14, "--raw", "--device", "cpu", "--batch", 3)
    found, tokenizer = generated(run_cli("generate", *common, "--json")), AutoTokenizer.from_pretrained(hf)
    for prompt, made in zip(PROMPTS, found, strict=True):
        assert made["prompt"] == prompt and made["prompt_tokens"] == tokenizer.encode(prompt)
        assert made["tokens"] == theirs(hf, made["prompt_tokens"], 14)
        stopped = made["finish"] == "stop"
        assert stopped == (made["tokens"][-1] in (0, 2))
        assert made["text"] == tokenizer.decode(made["tokens"][:-1] if stopped else made["tokens"])
        assert len(made["logprobs"]) == len(made["tokens"]) and max(made["logprobs"]) <= 0 and made["tok_per_s"] > 0
    heads = [f"--- {n}: {prompt} ---\n" for n, prompt in enumerate(PROMPTS, 1)]
    texts = [m["text"] + ("" if m["text"].endswith("\n") else "\n") for m in found]
    expected = "".join(head + text for head, text in zip(heads, texts, strict=True))
    done = run_cli("generate", *common, cold=True)
    assert (done.returncode, done.stdout) == (0, read_as_text(expected))
    file = tmp_path / "p.txt"
    file.write_text(PROMPTS[0] + "\n", encoding="utf-8")
    done = run_cli("generate", hf, "--file", file, *common[-9:])
    assert (done.returncode, done.stdout) == (0, read_as_text(texts[0]))


def read_as_text(text: str) -> str:
    """As a pipe that is read in text mode gives it."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def test_a_chat_template_wraps_prompts_unless_they_are_raw(hf: Path, run_cli: Cli, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "the fox"}) + "\n" + json.dumps({"messages": messages}) + "\n")
    common = ("generate", hf, "--recipe", "fp32", "--max-new-tokens", 6, "--json", "--device", "cpu")
    found, tokenizer = generated(run_cli(*common, "--file", file, "--system", "S")), AutoTokenizer.from_pretrained(hf)
    system = {"role": "system", "content": "S"}
    for wanted, made in zip([[{"role": "user", "content": "the fox"}], messages], found, strict=True):
        ids = tokenizer.apply_chat_template([system, *wanted], add_generation_prompt=True, tokenize=True)["input_ids"]
        assert made["prompt_tokens"] == list(ids) and made["tokens"] == theirs(hf, list(ids), 6)
    sampled = (*common, "--prompt", "the fox", "--temperature", 1.5, "--top-p", 0.9, "--top-k", 50)
    one, again, other = (generated(run_cli(*sampled, "--seed", seed))[0] for seed in (1, 1, 2))
    assert one["tokens"] == again["tokens"] != other["tokens"]
    done = run_cli(*common, "--file", file, "--raw")
    assert done.returncode == 3 and json.loads(done.stdout)["error"]["where"] == f"{file}:2"


def test_a_run_its_checkpoint_and_its_export_say_the_same(run_cli: Cli, train: Cli, tmp_path: Path) -> None:
    assert train("--steps", 4, "--recipe", "infir2", "--eval-every", 0, name="mine").returncode == 0
    assert run_cli("convert", "to-hf", "mine", "out", cwd=tmp_path).returncode == 0
    common = ("--prompt", "def main(", "--max-new-tokens", 12, "--device", "cpu", "--raw")
    done = run_cli("generate", *common, cwd=tmp_path)
    assert done.returncode == 0 and "the run written to last" in done.stdout, done.stderr
    sources = ("mine", "runs/mine/checkpoints/step-00000004", "out")
    found = [json.loads(run_cli("generate", s, *common, "--json", cwd=tmp_path).stdout) for s in sources]
    assert [facts["recipe"] for facts in found] == ["infir2"] * 3
    first = found[0]["generations"][0]
    assert first["prompt_tokens"] == list(b"def main(") and done.stdout.endswith(f"{first['text']}\n")
    for facts in found[1:]:
        assert (facts["generations"][0]["tokens"], facts["generations"][0]["logprobs"]) == (
            first["tokens"], first["logprobs"],
        )  # fmt: skip
    other = generated(run_cli("generate", "mine", *common, "--json", "--recipe", "fp32", cwd=tmp_path))
    assert other[0]["tokens"][:1] == first["tokens"][:1] and other[0]["logprobs"] != first["logprobs"]
    assert other[0]["tokens"] == theirs_of_export(run_cli, tmp_path, first["prompt_tokens"])
    shutil.copytree(tmp_path / "runs/mine/checkpoints/step-00000004", tmp_path / "moved")
    done = run_cli("generate", "moved", *common, cwd=tmp_path)
    assert done.returncode == 3 and "without a tokenizer" in done.stderr and "--tokenizer" in done.stderr
    assert run_cli("generate", "moved", *common, "--tokenizer", "byte", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("during", ["check_hashes", "rows_as"])
def test_a_checkpoint_that_is_retired_while_it_is_read(
    during: str, train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run that is training does it: what is read then is its newest one."""
    from infir2_core.convert import ready, weights
    from infir2_core.errors import InputError

    saved = tmp_path / "runs" / "mine" / "checkpoints"
    assert train("--steps", 2, "--recipe", "bf16", "--eval-every", 0, name="mine").returncode == 0
    step, aside = saved / "step-00000002", tmp_path / "step-00000002"
    module, left = weights if during == "check_hashes" else ready, [1]
    read = getattr(module, during)

    def retire_meanwhile(*arguments: Any) -> Any:
        if left:
            left.pop()
            shutil.move(step, aside)
            shutil.copytree(aside, saved / "step-00000003")  # what a manifest says of its step is checked
            manifest = json.loads((aside / "manifest.json").read_text())
            del manifest["sha256"]
            (saved / "step-00000003" / "manifest.json").write_text(seal(manifest | {"step": 3}))
        return read(*arguments)

    def load(folder: Path) -> Path:
        found = ready.find_model(folder, "MODEL")
        return ready.load_model(found, ready.choose_recipe(found, None), "cpu", lambda done, total: None)[
            1
        ].weights.path

    with monkeypatch.context() as patched:
        patched.setattr(module, during, retire_meanwhile)
        assert load(tmp_path / "runs" / "mine") == saved / "step-00000003"
        shutil.move(aside, step)
        shutil.rmtree(saved / "step-00000003")
        left.append(1)
        with pytest.raises((InputError, OSError)):  # it was asked for by name, and no other one is
            load(step)


def theirs_of_export(run_cli: Cli, folder: Path, ids: list[int]) -> list[int]:
    assert run_cli("convert", "to-hf", "mine", "out32", "--dtype", "float32", cwd=folder).returncode == 0
    return theirs(folder / "out32", ids, 12)


def test_delayed_scaling_takes_its_histories_from_the_checkpoint(run_cli: Cli, train: Cli, tmp_path: Path) -> None:
    assert train("--steps", 3, "--recipe", "fp8-delayed", "--eval-every", 0, name="mine").returncode == 0
    assert run_cli("convert", "to-hf", "mine", "out", cwd=tmp_path).returncode == 0
    common = ("--prompt", "import ", "--max-new-tokens", 5, "--device", "cpu", "--raw")
    scaled, plain = (
        generated(run_cli("generate", "mine", *common, "--json", *more, cwd=tmp_path))[0]
        for more in ((), ("--recipe", "bf16"))
    )
    assert 0 < abs(scaled["logprobs"][0] - plain["logprobs"][0]) < 0.05
    done = run_cli("generate", "out", *common, cwd=tmp_path)
    assert done.returncode == 3 and "amaxes of earlier steps" in done.stderr and "--recipe bf16" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        ((), 2, "give either --prompt or --file"),
        (("--prompt", "a", "--file", "p.txt"), 2, "give either --prompt or --file"),
        (("--prompt", "a", "--top-p", 0.9), 2, "add --temperature 1"),
        (("--prompt", "a", "--raw", "--system", "S"), 2, "needs the chat template"),
        (("--prompt", "a", "--batch", 0), 2, "--batch"),
        (("--prompt", "a", "--device", "tpu"), 2, "--device is 'tpu'"),
        (("--prompt", "a", "--temperature", -1), 3, "temperature is -1.0, it must be 0 (greedy) or above"),
        (("--prompt", "a", "--temperature", 1, "--top-p", 0), 3, "top_p is 0.0, it must be above 0 and at most 1"),
        (("--prompt", "a", "--temperature", 1, "--top-p", 1.5), 3, "top_p is 1.5"),
        (("--prompt", "a", "--temperature", 1, "--top-k", -3), 3, "top_k is -3"),
        (("--prompt", "a", "--max-new-tokens", 0), 3, "max_new_tokens is 0"),
        (("--prompt", ""), 3, "the prompt is empty"),
        (("--prompt", "ok", "--prompt", "a longer one " * 30), 3, "the model 64 positions"),
        (("--prompt", "a", "--chat"), 3, "no chat template"),
        (("--prompt", "a", "--system", "S"), 3, "no chat template"),
        (("--file", "none.txt"), 3, "there is no such file"),
        (("--file", "empty.txt"), 3, "there is no prompt in this file"),
        (("--prompt", "a", "--recipe", "infr2"), 3, "Did you mean 'infir2'?"),
        (("--prompt", "a", "--recipe", "nvfp4"), 3, "what is not implemented"),
        (("--prompt", "a", "--tokenizer", "nothing"), 3, "no such tokenizer: nothing"),
        (("--prompt", "a", "--tokenizer", "wide"), 3, "but the model's vocabulary has 280"),
    ],
)
def test_what_cannot_be_asked(
    words: tuple[object, ...],
    code: int,
    what: str,
    bad: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from infir2_cli.main import main

    device = () if "--device" in words else ("--device", "cpu")
    monkeypatch.chdir(bad)
    monkeypatch.setattr(sys, "argv", ["infir2", "generate", "hf", *map(str, (*words, *device))])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == code and what in err and out == "", err
    assert "hint:" in err


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of 280 ids, and things that do not go with it."""
    folder = tmp_path_factory.mktemp("bad")
    write_model(folder / "hf", layers=1, vocab=280)
    train_bpe(folder / "hf", vocabulary=270)
    (folder / "hf" / "chat_template.jinja").unlink()
    train_bpe(folder / "wide")
    (folder / "empty.txt").write_text("\n")
    return folder


def test_models_that_cannot_be_used(bad: Path, run_cli: Cli, tmp_path: Path) -> None:
    def refused(words: tuple[object, ...], *expected: str) -> None:
        done = run_cli("generate", *words, "--prompt", "a", "--device", "cpu", cwd=tmp_path)
        assert done.returncode == 3 and all(e in done.stderr for e in expected), done.stderr

    refused((), "there is no run yet")
    refused(("nothing",), "'nothing' is neither a folder, nor a hub id, nor a run")
    (tmp_path / "empty").mkdir()
    refused(("empty",), "no weights here")
    shutil.copytree(bad / "hf", tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").unlink()
    refused(("hf",), "the model comes without a tokenizer", "--tokenizer")
    edit_config(tmp_path / "hf", use_sliding_window=True)
    refused(("hf",), "use_sliding_window = True is not supported")
    edit_config(tmp_path / "hf", use_sliding_window=False, quantization_config={"quant_method": "fp8"})
    refused(("hf",), "the model is quantised (fp8)", "bf16 model")
    (tmp_path / "hf/model.safetensors").write_bytes(b"x" * 40)
    refused(("hf",), "model.safetensors")
