"""Prompts from files, chat templates, text as it comes, and the screen that shows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_bpe import train_bpe

from infir2_cli import output
from infir2_cli.generating import Screen, _Answer, encode
from infir2_core.data.prompts import Prompt, TextStream, has_template, read_prompts
from infir2_core.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from infir2_core.errors import InputError

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'robot' %}{{ raise_exception('no robots here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["naïve 日本語 🙂 x", "def f(x):\n\treturn '🙂'\n", "", "é", "the quick\ufffd fox"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(train_bpe(tmp_path_factory.mktemp("bpe"), chat_template=TEMPLATE)))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.add(i) for i in ids), stream.end()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_text_comes_without_half_characters_and_whole(text: str, kind: str, bpe: Tokenizer) -> None:
    tokenizer = ByteTokenizer() if kind == "byte" else bpe
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    if kind == "byte" and text == "é":
        assert pieces == ["", "é", ""]


@given(ids=st.lists(st.integers(0, 259), max_size=30))
def test_any_bytes_give_in_pieces_what_they_give_at_once(ids: list[int]) -> None:
    assert "".join(streamed(ByteTokenizer(), ids)) == ByteTokenizer().decode(ids)


@given(data=st.data())
def test_any_tokens_give_in_pieces_what_they_give_at_once(bpe: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, bpe.size - 1), max_size=20))
    assert "".join(streamed(bpe, ids)) == bpe.decode(ids)


def test_prompts_of_a_chat_are_what_transformers_makes_of_them(bpe: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(bpe.location)
    turns = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "fox"}]
    whole = [*turns, {"role": "user", "content": "日本語"}]
    prompts = [Prompt("brown fox", "a"), Prompt(whole, "b"), Prompt([{"role": "system", "content": "S"}, *whole], "c")]
    wanted = [[{"role": "user", "content": "brown fox"}], whole, prompts[2].content]

    def ids(messages: Any) -> list[int]:
        made = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        return list(made["input_ids"])

    assert encode(prompts, bpe, None, None, 999) == [ids(messages) for messages in wanted]
    system = {"role": "system", "content": "Say no."}
    with_system = [[system, *wanted[0]], [system, *whole], wanted[2]]
    assert encode(prompts, bpe, None, "Say no.", 999) == [ids(messages) for messages in with_system]
    assert encode(prompts[:1], bpe, False, None, 999) == [bpe.encode("brown fox")]


def test_where_a_chat_template_may_stand(bpe: Tokenizer, tmp_path: Path) -> None:
    assert has_template(bpe) and not has_template(ByteTokenizer())
    plain = load_tokenizer(str(train_bpe(tmp_path / "plain")))
    assert not has_template(plain)
    assert encode([Prompt("fox", "a")], plain, None, None, 99) == [plain.encode("fox")]
    (tmp_path / "plain" / "chat_template.jinja").write_text(TEMPLATE)
    assert has_template(plain)
    assert encode([Prompt("fox", "a")], plain, None, None, 99) == encode([Prompt("fox", "a")], bpe, None, None, 99)


@pytest.mark.parametrize(
    ("content", "chat", "system", "what"),
    [
        ("", False, None, "the prompt is empty"),
        ("", None, None, "the prompt is empty"),
        (" \n", True, "Be good.", "the prompt is empty"),
        ("fox " * 50, False, None, "the model 40 positions"),
        ("fox " * 50, True, None, "the model 40 positions"),
        ([{"role": "user", "content": "x"}], False, None, "these are chat messages"),
        ([{"role": "robot", "content": "x"}], None, None, "no robots here"),
        ([{"role": "user"}, {"role": "robot"}], None, "Be good.", "template fails on this prompt"),
    ],
)
def test_prompts_that_give_no_ids(content: Any, chat: bool | None, system: str | None, what: str, bpe: Any) -> None:
    with pytest.raises(InputError, match=what) as caught:
        encode([Prompt("fox", "here"), Prompt(content, "there")], bpe, chat, system, 40)
    assert caught.value.where == "there"


@pytest.mark.parametrize(("chat", "system"), [(True, None), (None, "Be good.")])
def test_a_chat_needs_a_template(chat: bool | None, system: str | None, tmp_path: Path) -> None:
    plain = load_tokenizer(str(train_bpe(tmp_path)))
    with pytest.raises(InputError, match="no chat template") as caught:
        encode([Prompt("x", "here")], plain, chat, system, 40)
    assert "--raw" in caught.value.hint and "--tokenizer" in caught.value.hint


def test_files_of_prompts(tmp_path: Path) -> None:
    text = tmp_path / "p.txt"
    text.write_text("one\n\n  two \n", encoding="utf-8")
    assert read_prompts(text) == [Prompt("one", f"{text}:1"), Prompt("  two ", f"{text}:3")]
    lines, messages = tmp_path / "p.jsonl", [{"role": "user", "content": "a\u2028b"}]
    records = [{"prompt": "one\ntwo", "id": 7}, {"messages": messages}]
    written = "\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n\n"
    for encoding in ("utf-8", "utf-8-sig"):  # as some editors save it, with a byte order mark
        lines.write_text(written, encoding=encoding)
        assert read_prompts(lines) == [Prompt("one\ntwo", f"{lines}:1"), Prompt(messages, f"{lines}:2")]
    text.write_text("one", encoding="utf-8-sig")
    assert read_prompts(text) == [Prompt("one", f"{text}:1")]


def test_tools_reach_the_template(tmp_path: Path) -> None:
    shows = "{% if tools %}{{ tools[0]['name'] }}{% endif %}" + TEMPLATE
    tokenizer = load_tokenizer(str(train_bpe(tmp_path / "bpe", chat_template=shows)))
    path, messages = tmp_path / "p.ndjson", [{"role": "user", "content": "fox"}]
    records: list[dict[str, Any]] = [{"messages": messages}, {"prompt": "fox"}]
    records += [{**record, "tools": tools} for record in records for tools in ([{"name": "f"}], '[{"name": "f"}]')]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    without, text, *others = encode(read_prompts(path), tokenizer, None, None, 99)
    assert without == text and all(tokenizer.decode(ids) == "f" + tokenizer.decode(without) for ids in others)
    with pytest.raises(InputError, match="these are tools"):
        encode(read_prompts(path)[4:], tokenizer, False, None, 99)


def test_messages_have_the_form_that_training_gives_them(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    said = [{"role": "user", "content": parts}, call, {"role": "tool", "content": "7"}]
    path.write_text(json.dumps({"messages": said}))
    made = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert read_prompts(path)[0].content == [{"role": "user", "content": "ab"}, made, said[2]]


@pytest.mark.parametrize(
    ("name", "content", "what", "place"),
    [
        ("p.txt", b"", "no prompt in this file", "p.txt"),
        ("p.txt", b" \n\n", "no prompt in this file", "p.txt"),
        ("p.jsonl", b"\n", "no prompt in this file", "p.jsonl"),
        ("p.txt", b"ok\n\xff", "not UTF-8", "p.txt"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt"', "not JSON", "p.jsonl:2"),
        ("p.jsonl", b'["a"]', "either 'prompt' or 'messages'", "p.jsonl:1"),
        ("p.jsonl", b'{"text": "a"}', "either 'prompt' or 'messages'", "p.jsonl:1"),
        ("p.jsonl", b'{"prompt": "a", "messages": []}', "either 'prompt' or 'messages'", "p.jsonl:1"),
        ("p.jsonl", b'{"prompt": ""}', "not empty", "p.jsonl:1"),
        ("p.jsonl", b'{"prompt": 3}', "must be a text", "p.jsonl:1"),
        ("p.jsonl", b'{"messages": []}', "must be a list of objects", "p.jsonl:1"),
        ("p.jsonl", b'{"messages": [{"content": "x"}]}', "message 1 has the role None", "p.jsonl:1"),
        ("p.jsonl", b'{"messages": {"role": "user"}}', "must be a list of objects", "p.jsonl:1"),
        ("p.jsonl", b'{"messages": [{"role": "user", "content": 7}]}', "content is not text: message 1", "p.jsonl:1"),
        ("p.jsonl", b'{"prompt": "a", "tools": 3}', "not a list of schemas", "p.jsonl:1"),
        ("p.ndjson", b'{"prompt"', "not JSON", "p.ndjson:1"),
        ("p.jsonl", b'{"messages": [{"role": "user"}]}', "empty content: message 1", "p.jsonl:1"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "half a surrogate pair", "p.jsonl:1"),
        ("p.jsonl", b'{"prompt": ' + b"[" * 100_000, "not JSON: maximum recursion", "p.jsonl:1"),
        ("p.jsonl", b'{"messages": [{"role": "assistant", "content": "x"}]}', "nothing to answer", "p.jsonl:1"),
        ("p.d", None, "this is a folder", "p.d"),
        ("none.txt", None, "no such file", "none.txt"),
    ],
)
def test_files_that_hold_no_prompts(name: str, content: bytes | None, what: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "p.d").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=what) as caught:
        read_prompts(tmp_path / name)
    assert caught.value.where.endswith(place) and caught.value.hint


def test_the_screen_shows_one_answer_at_a_time_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [
        Prompt("first\nline", "1"),
        Prompt("word " * 30, "2"),
        Prompt([{"role": "user", "content": "third"}], "3"),
    ]
    answers = [_Answer(TextStream(ByteTokenizer())) for _ in prompts]
    screen, seen = Screen(prompts, answers), []
    for number, piece, ended in [(1, "b1", 0), (0, "a1", 0), (2, "c1\n", 1), (1, "b2", 1), (0, "a2", 1)]:
        answers[number].text += piece
        answers[number].finish = "stop" if ended else None
        screen.show(number, piece)
        seen.append(capsys.readouterr().out)
    title = "word " * 12
    assert seen[:4] == ["--- 1: first line ---\n", "a1", "", ""]
    assert seen[4] == f"a2\n--- 2: {title}... ---\nb1b2\n--- 3: third ---\nc1\n"


def test_a_terminal_gets_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\tb\n\x1b[2J\x07\x9bc日\r"
    output.say_part(text)
    assert capsys.readouterr().out == text, "a file gets what the model wrote"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.say_part(text)
    assert capsys.readouterr().out == "a\tb\n[2Jc日"
