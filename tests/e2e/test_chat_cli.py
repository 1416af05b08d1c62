"""`infir2 data show --chat` and `infir2 data chat-demo` as a user types them: what is trained, colours, bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_bpe import train_bpe

from infir2_core.data.byte_files import BYTE_TEMPLATE

GOOD = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


def test_a_demo_set_and_a_look_at_it(tmp_path: Path, run_cli: Any) -> None:
    planned = run_cli("data", "chat-demo", "--out", "chat.jsonl", "--limit", 3, "--dry-run", cwd=tmp_path)
    assert planned.returncode == 0 and "would write" in planned.stdout and not list(tmp_path.iterdir())
    made = run_cli("data", "chat-demo", "--out", "chat.jsonl", "--limit", 3, cwd=tmp_path, cold=True)
    assert made.returncode == 0 and "chat.jsonl: 3 samples" in made.stdout, made.stderr
    record = json.loads((tmp_path / "chat.jsonl").read_text().splitlines()[1])
    question, answer = (message["content"] for message in record["messages"])
    shown = run_cli("data", "show", "--chat", "chat.jsonl", "--index", 1, cwd=tmp_path, cold=True)
    assert shown.returncode == 0, shown.stderr
    assert f"«{answer}<|im_end|>»" in shown.stdout and f"<|im_start|>user\n{question}<|im_end|>" in shown.stdout
    counts = f"{len(question) + len(answer) + 21} tokens, {len(answer) + 1} trained"
    assert f"chat.jsonl, line 2 (messages): 2 messages, {counts}" in shown.stdout
    assert "ends with <|im_end|> (id 258)" in shown.stdout


def test_colours_on_a_terminal_and_a_tokenizer_of_words(tmp_path: Path, run_cli: Any) -> None:
    train_bpe(tmp_path / "bpe", chat_template=BYTE_TEMPLATE)
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n")
    colours = {"NO_COLOR": "", "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    shown = run_cli("data", "show", "--chat", "a.jsonl", "--tokenizer", "bpe", cwd=tmp_path, env=colours)
    assert shown.returncode == 0, shown.stderr
    assert "\x1b[32m4<|im_end|>\x1b[0m" in shown.stdout and "«" not in shown.stdout
    masked = "".join(re.findall(r"\x1b\[90m(.*?)\x1b\[0m", shown.stdout))
    assert "2 + 2?<|im_end|>" in masked and "4<|im_end|>" not in masked


def test_json(tmp_path: Path, run_cli: Any) -> None:
    thought = {"conversations": [{"from": "human", "value": "é?"}, {"from": "gpt", "value": "!"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(thought) + "\n")
    shown = json.loads(run_cli("data", "show", "--chat", "a.jsonl", "--json", cwd=tmp_path).stdout)
    assert (shown["layout"], shown["tokens"], shown["trained_tokens"]) == ("conversations", len(shown["ids"]), 2)
    assert [i for i, trained in zip(shown["ids"], shown["trained"], strict=True) if trained] == [ord("!"), 258]
    assert "".join(part["text"] for part in shown["parts"]).endswith("<|im_start|>assistant\n!<|im_end|>\n")
    made = json.loads(run_cli("data", "chat-demo", "--out", "b.jsonl", "--limit", 2, "--json", cwd=tmp_path).stdout)
    assert made["samples"] == 2 and made["out"] == "b.jsonl"


def turns(*said: tuple[str, str]) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in said]})


@pytest.mark.parametrize(
    ("line", "arguments", "where", "message"),
    [
        ('{"messages": oops}', [], "a.jsonl, line 2", "not JSON"),
        (turns(("user", "?")), [], "a.jsonl, line 2", "no assistant turn"),
        (turns(("user", "?"), ("robot", "!")), [], "a.jsonl, line 2", "unknown role: message 2 has the role 'robot'"),
        (turns(("user", ""), ("assistant", "!")), [], "a.jsonl, line 2", "empty content: message 1 (user)"),
        ('{"text": "x"}', [], "a.jsonl, line 2", "it has text"),
        (turns(("user", "fail"), ("assistant", "!")), ["--tokenizer", "bpe"], "a.jsonl, line 2", "told to fail"),
        (turns(("user", "?"), ("assistant", "!")), ["--tokenizer", "plain"], "--tokenizer plain", "no chat template"),
        (turns(("user", "?"), ("assistant", "!")), ["--index", "2"], "a.jsonl", "there is no record 2"),
        (turns(("user", "?"), ("assistant", "!")), ["--tokenizer", "bite"], "--tokenizer", "no such tokenizer"),
    ],
)
def test_bad_input(tmp_path: Path, run_cli: Any, line: str, arguments: list[str], where: str, message: str) -> None:
    fails = "{% if messages[0].content == 'fail' %}{{ raise_exception('told to fail') }}{% endif %}" + BYTE_TEMPLATE
    train_bpe(tmp_path / "bpe", chat_template=fails)
    train_bpe(tmp_path / "plain")
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n" + line + "\n")
    index = [] if "--index" in arguments else ["--index", "1"]
    result = run_cli("data", "show", "--chat", "a.jsonl", *index, *arguments, cwd=tmp_path)
    assert result.returncode == 3 and message in result.stderr and "Traceback" not in result.stderr
    assert f"where: {where}" in result.stderr and "hint:" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "--chat", "nothing.jsonl"], 3, "no such file or folder"),
        (["show", "--chat", "empty"], 3, "holds no .jsonl or .parquet file"),
        (["show", "--chat", "a.json"], 3, "jq -c '.[]' a.json > a.jsonl"),
        (["show", "corpus", "--chat", "a.jsonl"], 2, "a corpus and chat data are named"),
        (["chat-demo", "--out", "a.json/b.jsonl"], 3, "cannot write here"),
        (["show", "--chat", ""], 3, "--chat is empty"),
        (["chat-demo", "--out", ""], 3, "this names no file"),
        (["chat-demo", "--out", "a.json"], 3, "--out a.jsonl"),
        (["chat-demo", "--out", "mine.jsonl"], 3, "would be overwritten"),
        (["chat-demo", "--out", "/dev/null"], 3, "hint:"),
        (["chat-demo"], 2, "--out"),
    ],
)
def test_wrong_places(tmp_path: Path, run_cli: Any, arguments: list[str], code: int, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "mine.jsonl").write_text("{}\n")
    result = run_cli("data", *arguments, cwd=tmp_path)
    assert result.returncode == code and message in result.stderr and "Traceback" not in result.stderr
