"""Masks of what is trained: against transformers' generation markers and a prefix diff by brute force."""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_bpe import train_bpe
from transformers import PreTrainedTokenizerFast

from infir2_core.data import chat_template
from infir2_core.data.byte_files import BYTE_TEMPLATE, byte_files
from infir2_core.data.chat_record import SampleError
from infir2_core.data.chat_template import ChatTokenizer, common_prefix, load_chat_tokenizer
from infir2_core.errors import InputError

DATA = Path(__file__).parent.parent / "data"
QWEN = (DATA / "qwen_marked.jinja").read_text(encoding="utf-8")
THINKING = (DATA / "thinking_marked.jinja").read_text(encoding="utf-8")
TEMPLATES = {"qwen": QWEN, "thinking": THINKING}
# Merges across the borders of turns, so that tokens straddle them.
TEXT = "<|im_start|>assistant\nHello there.\n\n  Hi<|im_end|>\n<|im_start|>user\n日本 naïve?\n" * 30
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def unmarked(template: str) -> str:
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)


def folder_with(template: str, **config: Any) -> Path:
    folder = train_bpe(Path(mkdtemp()), 330, text=TEXT, words=False, **config)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@cache
def twins(name: str) -> tuple[ChatTokenizer, ChatTokenizer, PreTrainedTokenizerFast]:
    """The same tokenizer with an unmarked and a marked template, and transformers' own with the marked one."""
    marked = folder_with(TEMPLATES[name])
    plain = load_chat_tokenizer(str(folder_with(unmarked(TEMPLATES[name]))))
    return plain, load_chat_tokenizer(str(marked)), PreTrainedTokenizerFast.from_pretrained(marked)


WORDS = st.lists(
    st.sampled_from(
        ["Hello there.", "\n", "\n\n", " ", "  Hi", "日本", "naïve?", "é", "x" * 9, "assistant\n", "</think>a"]
    ),
    min_size=1,
    max_size=6,
)
SAID = WORDS.map(lambda words: "".join(words) + "!")
CALL = st.builds(
    lambda n, said: {"type": "function", "function": {"name": "add", "arguments": {"a": n, "said": said}}},
    st.integers(0, 99),
    SAID,
)


@st.composite
def conversations(draw: st.DrawFn, thoughts: bool = False, calls: bool = True) -> list[dict[str, Any]]:
    """A system prompt perhaps, then questions, each answered at once or by calls, their results and more answers."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(SAID | st.just(""))})
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(SAID)})
        while calls and draw(st.integers(0, 3)) == 3:
            made = draw(st.lists(CALL, min_size=1, max_size=2))
            messages.append({"role": "assistant", "content": draw(SAID | st.just("")), "tool_calls": made})
            messages += [{"role": "tool", "content": draw(SAID)} for _ in made]
        answer = {"role": "assistant", "content": draw(SAID)}
        if thoughts and draw(st.booleans()):
            answer["reasoning_content"] = draw(SAID)
        messages.append(answer)
    return messages


def by_brute_force(
    hf: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: Any
) -> tuple[list[int], list[bool]]:
    """Ids, and tokens that share a character with what one more message adds behind the generation prompt."""
    whole = hf.apply_chat_template(messages, tools=tools, tokenize=False)
    trained = np.zeros(len(whole), bool)
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = hf.apply_chat_template(messages[:n], tools=tools, tokenize=False, add_generation_prompt=True)
            answered = hf.apply_chat_template(messages[: n + 1], tools=tools, tokenize=False)
            assert whole.startswith(answered) and answered.startswith(prompt) and answered.endswith("<|im_end|>\n")
            trained[len(prompt) : len(answered) - 1] = True
    encoded = hf(whole, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [bool(trained[a:b].any()) for a, b in encoded["offset_mapping"]]


@given(messages=conversations(), tools=st.sampled_from([None, TOOLS]))
@settings(deadline=None, max_examples=150)
def test_masks_equal_markers_and_brute_force(messages: list[dict[str, Any]], tools: Any) -> None:
    plain, marked, hf = twins("qwen")
    ids, mask = plain.encode_chat(messages, tools)
    theirs = hf.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    assert (ids.dtype, mask.dtype) == (np.int32, bool)
    assert ids.tolist() == theirs["input_ids"] and mask.tolist() == [bool(m) for m in theirs["assistant_masks"]]
    assert (ids.tolist(), mask.tolist()) == by_brute_force(hf, messages, tools)
    for ours, other in zip((ids, mask), marked.encode_chat(messages, tools), strict=True):
        np.testing.assert_array_equal(ours, other)
    ends = ids[mask] == plain.turn_end_id
    assert ends.sum() == sum(message["role"] == "assistant" for message in messages) and ends[-1]


@given(messages=conversations(thoughts=True, calls=False))
@settings(deadline=None, max_examples=100)
def test_thinking_left_out_of_earlier_turns_is_followed_exactly(messages: list[dict[str, Any]]) -> None:
    plain, _, hf = twins("thinking")
    ids, mask = plain.encode_chat(messages)
    theirs = hf.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert ids.tolist() == theirs["input_ids"] and mask.tolist() == [bool(m) for m in theirs["assistant_masks"]]


def test_tokens_straddle_the_border_in_these_tests() -> None:
    """Otherwise the tests above would not test it: a token holds the prompt's last and the answer's first letters."""
    plain, _, _ = twins("qwen")
    ids, mask = plain.encode_chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": "Hello there.!"}])
    assert "assistant\nHe" in plain.tokenizer.pieces([int(ids[mask][0])])[0]


def test_history_that_is_rewritten_is_refused_without_markers() -> None:
    """Turn 2 was thought before turn 4's answer was known; with the next question the template drops this thought."""
    call = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "", "reasoning_content": "call it", "tool_calls": call},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "it is 1"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "2"},
    ]
    plain, marked, _ = twins("thinking")
    assert plain.encode_chat(messages[:4])[1].any()
    with pytest.raises(SampleError, match="message 2 differently|message 4 differently") as error:
        plain.encode_chat(messages)
    assert error.value.kind == "template rewrites history"
    ids, mask = marked.encode_chat(messages)
    assert "call it" not in marked.tokenizer.decode(ids.tolist()) and mask.any()


def test_a_prompt_that_opens_the_thinking() -> None:
    """DeepSeek-R1's manner: the prompt ends with <think>, earlier turns do not have it. Trained is the whole turn."""
    template = unmarked(THINKING).replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    )
    assert template.count("<think>\\n' }}") == 1
    chat = load_chat_tokenizer(str(folder_with(template)))
    for content, trained in (("plain", "plain"), ("<b>", "<b>"), ("<think>\nhm\n</think>\n\nso", "hm\n</think>\n\nso")):
        ids, mask = chat.encode_chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": content}])
        text = chat.tokenizer.decode(ids[mask].tolist())
        assert text == f"{trained}<|im_end|>"


def test_white_space_behind_every_rendering_is_nobodys() -> None:
    """A template file that ends with a space: the generation prompt has it too, the conversation not in that place."""
    chat = load_chat_tokenizer(str(folder_with(BYTE_TEMPLATE + " ")))
    said = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    ids, mask = chat.encode_chat(said)
    assert chat.tokenizer.decode(ids[mask].tolist()) == "assistant 0<|im_end|>assistant 1<|im_end|>"


def test_a_tail_behind_the_last_turn_only() -> None:
    """Phi-3's manner: the end of text follows the last message, unless a generation prompt does."""
    template = BYTE_TEMPLATE.replace("{% endif %}", "{% else %}{{ '<|endoftext|>' }}{% endif %}")
    chat = load_chat_tokenizer(str(folder_with(template)))
    said = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    ids, mask = chat.encode_chat(said)
    assert chat.tokenizer.decode(ids.tolist()).endswith("<|im_end|>\n<|endoftext|>")
    assert chat.tokenizer.decode(ids[mask].tolist()).endswith("assistant 1<|im_end|>")
    assert (ids[mask] == chat.turn_end_id).sum() == 2


def test_a_marked_span_without_its_turn_end_gets_it() -> None:
    template = QWEN.replace(
        "        {{- '<|im_end|>' }}\n        {%- endgeneration %}",
        "        {%- endgeneration %}\n        {{- '<|im_end|>' }}",
    )
    assert template != QWEN
    chat, (_, marked, _) = load_chat_tokenizer(str(folder_with(template))), twins("qwen")
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "語"}]
    np.testing.assert_array_equal(chat.encode_chat(messages)[1], marked.encode_chat(messages)[1])


def test_byte_tokenizer_renders_as_transformers_reads_its_files(tmp_path: Path) -> None:
    for name, text in byte_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "é?"},
        {"role": "assistant", "content": "日!"},
    ]
    chat, theirs = load_chat_tokenizer("byte"), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert chat.render(messages) == theirs.apply_chat_template(messages, tokenize=False)
    ids, mask = chat.encode_chat(messages)
    assert ids.tolist() == theirs.apply_chat_template(messages, return_dict=False)
    assert bytes(ids[mask][:-1].tolist()).decode() == "日!" and ids[mask][-1] == chat.turn_end_id == 258
    prompt = theirs.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=False)
    assert chat.encode_prompt(messages[:2]).tolist() == prompt == ids[: len(prompt)].tolist()
    assert load_chat_tokenizer(str(tmp_path)).template_hash == chat.template_hash


def test_reasoning_is_never_lost() -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}]
    folded, knows = load_chat_tokenizer("byte"), twins("thinking")[0]
    assert folded.folds(messages) and not knows.folds(messages)
    for chat in (folded, knows):
        ids, mask = chat.encode_chat(messages)
        assert chat.tokenizer.decode(ids[mask].tolist()) == "<think>\n2 + 2\n</think>\n\n4<|im_end|>"
    assert messages[1]["content"] == "4"  # the caller's data is left alone


def test_a_template_that_cuts_the_thinking_off_the_last_answer_is_told() -> None:
    """DeepSeek-R1's does so, which would take the reasoning out of what is trained without a word."""
    cuts = BYTE_TEMPLATE.replace("message['content'] +", "message['content'].split('</think>')[-1] +")
    chat = load_chat_tokenizer(str(folder_with(cuts)))
    question, thought = {"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>hm</think>4"}
    for answer in (thought, {"role": "assistant", "content": "4", "reasoning_content": "hm"}):
        with pytest.raises(SampleError, match="template drops thinking"):
            chat.encode_chat([question, answer])
    ids, mask = chat.encode_chat([question, thought, question, {"role": "assistant", "content": "5"}])
    assert chat.tokenizer.decode(ids[mask].tolist()) == "4<|im_end|>5<|im_end|>"


def test_encode_many_keeps_places() -> None:
    chat = load_chat_tokenizer("byte")
    good = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ok"}]
    calls = [good[0], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]
    made = chat.encode_many([(good, None), (calls, None), (good[:1], None), (good, None)])
    assert isinstance(made[1], SampleError) and "renders no tool calls" in made[1].detail
    assert isinstance(made[2], SampleError) and made[2].kind == "nothing to train"
    assert not isinstance(made[0], SampleError) and not isinstance(made[3], SampleError)
    np.testing.assert_array_equal(made[0][0], made[3][0])


def test_half_a_character_in_what_a_template_shows_is_that_samples_trouble() -> None:
    chat, good = twins("qwen")[0], [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ok"}]
    call = {"function": {"name": "\ud800", "arguments": {}}}
    calls = [good[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    made = chat.encode_many([(good, None), (calls, None)])
    assert not isinstance(made[0], SampleError)
    assert isinstance(made[1], SampleError) and made[1].kind == "content is not text"


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_come_to_an_end_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chat_template, "LIMIT", 0.3)
    slow = "{% if messages[0].content == 'slow' %}" + ENDLESS + "{% endif %}" + BYTE_TEMPLATE
    chat = load_chat_tokenizer(str(train_bpe(tmp_path / "slow", chat_template=slow)))
    before, answer = signal.getsignal(signal.SIGALRM), {"role": "assistant", "content": "!"}
    chats = [([{"role": "user", "content": said}, answer], None) for said in ("slow", "fast")]
    failed, made = chat.encode_many(chats)
    assert isinstance(failed, SampleError) and failed.kind == "template fails" and "longer than 0.3 s" in failed.detail
    assert isinstance(made, tuple)
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    with ThreadPoolExecutor(1) as pool:  # signals reach the main thread alone
        assert pool.submit(chat.encode_chat, *chats[1]).result()
    with pytest.raises(InputError, match="longer than 0.3 seconds"):
        load_chat_tokenizer(str(train_bpe(tmp_path / "never", chat_template=ENDLESS)))


def test_the_assistant_may_open_where_the_template_lets_it() -> None:
    opening = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "?"}]
    chat = load_chat_tokenizer("byte")
    ids, mask = chat.encode_chat(opening)
    assert chat.tokenizer.decode(ids[mask].tolist()) == "hi<|im_end|>"
    with pytest.raises(SampleError, match="opens with the assistant"):
        twins("qwen")[0].encode_chat(opening)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ messages | nonsense }}", "fails on one question and answer"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "no special token"),
        ("{{ raise_exception('not today') }}", "not today"),
    ],
)
def test_unusable_templates(tmp_path: Path, template: str | None, message: str) -> None:
    folder = train_bpe(tmp_path)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match=message) as error:
        load_chat_tokenizer(str(folder))
    assert "--tokenizer" in error.value.where and "Instruct" in error.value.hint


def test_template_sandbox_and_digest(tmp_path: Path) -> None:
    escape = BYTE_TEMPLATE + "{{ messages.__class__.__mro__ }}"
    with pytest.raises(InputError, match="SecurityError"):
        load_chat_tokenizer(str(folder_with(escape)))
    one, same, other = (folder_with(t) for t in (BYTE_TEMPLATE, BYTE_TEMPLATE, BYTE_TEMPLATE + " "))
    content = json.loads((same / "tokenizer_config.json").read_text()) | {"model_max_length": 5}
    (same / "tokenizer_config.json").write_text(json.dumps(content))
    digests = [load_chat_tokenizer(str(folder)).digest for folder in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_common_prefix(a: str, b: str) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])
