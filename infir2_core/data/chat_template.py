"""Conversations to token ids and a mask of what is trained: the tokenizer's own chat template, rendered by transformers.

Trained is what the model has to write itself: the text of each assistant turn, from where the generation prompt ends to
the token that ends the turn, this one included. Which characters these are is found in one of two ways:

- A template with `{% generation %}` markers says so itself. A turn-end token right behind a marked span is added.
- Without markers, the conversation is rendered again up to each assistant turn. With R the whole conversation, H what
  comes before the turn and P the same with the generation prompt, the turn starts where P and R part, and that must not
  be before the end of H. It ends with the last turn-end token before the next message, whose place is told by rendering
  up to it with its content replaced. Both cuts are only taken where the renderings agree up to there, so a template that
  rewrites earlier turns (many drop the thinking of all but the last) is either followed exactly or the sample is refused.

The whole rendering is tokenised in one piece, as transformers does, so ids equal `apply_chat_template`'s. A token that
lies across the border of a turn is trained.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from infir2_core.data.byte_files import BYTE_TEMPLATE, byte_files
from infir2_core.data.chat_record import Message, SampleError, is_text
from infir2_core.data.tokenizer import HfTokenizer, Tokenizer, load_tokenizer
from infir2_core.errors import InputError

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # transformers looks for the same
PROBE = "b7e1f2probe"  # content that no template knows
INSTRUCT = "--tokenizer with the folder or hub id of an Instruct model, such as Qwen/Qwen2.5-1.5B-Instruct"
LIMIT = 20.0  # seconds of one rendering; real ones take milliseconds
VERSION = 2  # of the masks: raised when the same conversation would get another one
Spans = list[tuple[int, int]]


class ChatTokenizer:
    """A tokenizer and its chat template.

    Attributes:
        tokenizer: ids to text (`decode`, `pieces`).
        turn_end_id: the special token that ends an assistant turn; generation stops at it.
        turn_end: its text.
        template: Jinja source for conversations without tools.
        template_hash: sha256 (hex) of the template.
        digest: sha256 (hex) of all that decides the ids and masks of a conversation.
    """

    def __init__(self, tokenizer: Tokenizer, backend: Any, pretrained: Any) -> None:
        self.tokenizer, self._backend, self._pretrained = tokenizer, backend, pretrained
        if not pretrained.chat_template:
            raise InputError("this tokenizer has no chat template", f"--tokenizer {tokenizer.ref}", INSTRUCT)
        self.template = self._template(None)
        self.template_hash = hashlib.sha256(json.dumps(pretrained.chat_template).encode()).hexdigest()
        self.special = {i: t.content for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self.turn_end_id, self.turn_end = self._find_turn_end()
        reasoned = self._probed({"reasoning_content": PROBE[::-1]})
        self._folds_reasoning = PROBE[::-1] not in reasoned
        thought = self._probed({"content": f"<think>\n{PROBE[::-1]}\n</think>\n\n{PROBE}"})
        self._drops_thinking = PROBE[::-1] not in thought
        call = {"type": "function", "function": {"name": PROBE[::-1], "arguments": {}}}
        self._calls = PROBE[::-1] in self._probed({"tool_calls": [call]})
        named = [tokenizer.digest, self.template_hash, pretrained.special_tokens_map, VERSION]
        self.digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: list[Any] | None = None
    ) -> str:
        """The template's text for `messages`.

        Raises:
            SampleError: the template fails on them.
        """
        return self._render(list(messages), add_generation_prompt, tools, marked=False)[0]

    def encode_chat(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """int32 ids and a bool mask of the tokens that are trained; both of the same length.

        Raises:
            SampleError: the template fails, rewrites an earlier turn that would be trained, or leaves no token to train.
        """
        made = self.encode_many([(messages, tools)])[0]
        if isinstance(made, SampleError):
            raise made
        return made

    def encode_many(
        self, chats: Sequence[tuple[Sequence[Message], list[Any] | None]]
    ) -> list[tuple[np.ndarray, np.ndarray] | SampleError]:
        """`encode_chat` of each (messages, tools), faster than one at a time; errors in the place of what failed."""
        found = [self._try_spans(messages, tools) for messages, tools in chats]
        texts = [text for text, _ in (f for f in found if not isinstance(f, SampleError))]
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        return [f if isinstance(f, SampleError) else self._masked(next(encodings), f[1]) for f in found]

    def encode_prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> np.ndarray:
        """int32 ids of `messages` and the generation prompt: what the model continues.

        Raises:
            SampleError: the template fails on them.
        """
        text = self._render(self._prepared(messages), True, tools, marked=False)[0]
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def folds(self, messages: Sequence[Message]) -> bool:
        """Whether reasoning_content of `messages` is put in front of the content, as <think>...</think>.

        That is done where the template would leave it out.
        """
        return self._folds_reasoning and any(message.get("reasoning_content") for message in messages)

    def _template(self, tools: list[Any] | None) -> str:
        chosen: str = self._pretrained.get_chat_template(None, tools)
        return chosen

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them, so that nothing in them is lost."""
        prepared = []
        for message in messages:
            if message.get("tool_calls") and not self._calls:
                raise SampleError("template fails", "it renders no tool calls, and this sample has some")
            if self._folds_reasoning and message.get("reasoning_content"):
                thought = f"<think>\n{message['reasoning_content'].strip()}\n</think>\n\n"
                message = {k: v for k, v in message.items() if k != "reasoning_content"}
                message["content"] = thought + message["content"]
            prepared.append(message)
        if self._drops_thinking and prepared[-1]["role"] == "assistant" and "</think>" in prepared[-1]["content"]:
            raise SampleError("template drops thinking", "the last answer holds </think>, and the template cuts it there")
        return prepared

    def _render(
        self, messages: list[Message], prompt: bool, tools: list[Any] | None, marked: bool
    ) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with _limited():
                texts, spans = render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=self._template(tools),
                    return_assistant_tokens_mask=marked,
                    add_generation_prompt=prompt,
                    **self._pretrained.special_tokens_map,
                )
        except Exception as error:  # a template is a program: it may raise anything
            raise SampleError("template fails", f"{type(error).__name__}: {error}") from None
        if not is_text(texts[0]):  # in names, arguments or schemas: contents were looked at
            raise SampleError("content is not text", "half a surrogate pair is in what the template shows")
        return texts[0], spans[0] if marked else []

    def _try_spans(self, messages: Sequence[Message], tools: list[Any] | None) -> tuple[str, Spans] | SampleError:
        try:
            return self._spans(self._prepared(messages), tools)
        except SampleError as error:
            return error

    def _spans(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, Spans]:
        """The rendered conversation, and the characters [start, end) of it that are trained."""
        if MARKERS.search(self._template(tools)):
            text, spans = self._render(messages, False, tools, marked=True)
            ends = ((start, end + len(self.turn_end) * text.startswith(self.turn_end, end)) for start, end in spans)
            return text, list(ends)
        text = self.render(messages, tools=tools)
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self._turn(text, messages, n, tools) for n in turns]

    def _turn(self, text: str, messages: list[Message], n: int, tools: list[Any] | None) -> tuple[int, int]:
        """Characters [start, end) of assistant turn n in `text`, the rendering of all messages."""
        try:
            before, prompted = self.render(messages[:n], False, tools), self.render(messages[:n], True, tools)
        except SampleError:
            if n:
                raise
            what = "the conversation opens with the assistant, and the template needs a message before it"
            raise SampleError("template fails", what) from None
        start, history = common_prefix(prompted, text), common_prefix(prompted, before)
        if start < history:
            raise self._rewritten(n)
        if start < len(prompted):
            # The prompt says more than the conversation does (some open the thinking). Letters that follow may agree by
            # chance, so the turn starts where any content would part from the prompt.
            probed = self.render([*messages[:n], {"role": "assistant", "content": PROBE}], tools=tools)
            start = max(history, min(start, common_prefix(prompted, probed)))
        if n + 1 == len(messages):
            end = text.rfind(self.turn_end, start)
            return start, len(text) if end < 0 else end + len(self.turn_end)
        following = messages[n + 1] if messages[n + 1]["role"] != "assistant" else {"role": "assistant"}
        upto = self.render([*messages[: n + 1], {**following, "content": PROBE}], tools=tools)
        end = upto.rfind(self.turn_end, start, max(start, upto.rfind(PROBE)))
        if end < 0 or common_prefix(upto, text) < end + len(self.turn_end):
            raise self._rewritten(n)
        return start, end + len(self.turn_end)

    def _rewritten(self, n: int) -> SampleError:
        what = f"it renders the history of message {n + 1} differently once later messages follow"
        return SampleError("template rewrites history", what)

    def _masked(self, encoding: Any, spans: Spans) -> tuple[np.ndarray, np.ndarray] | SampleError:
        ids, mask = np.array(encoding.ids, np.int32), np.zeros(len(encoding.ids), bool)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for start, end in spans:
            # The tokens of one character all carry its offsets, and tokens without text of their own have none.
            inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            if len(inside):
                mask[inside[0] : inside[-1] + 1] = True
        if not mask[1:].any():  # the first token is nobody's target
            return SampleError("nothing to train", "no token of the rendered conversation belongs to the assistant")
        return ids, mask

    def _probed(self, extra: Message) -> str:
        """A conversation whose answer carries `extra`; empty when the template fails on it."""
        try:
            return self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE, **extra}])
        except SampleError:
            return ""

    def _find_turn_end(self) -> tuple[int, str]:
        where = f"--tokenizer {self.tokenizer.ref}"
        try:
            text = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}])
        except SampleError as error:
            raise InputError(f"the chat template fails on one question and answer: {error.detail}", where, INSTRUCT) from None
        tail = text[text.rfind(PROBE) + len(PROBE) :] if PROBE in text else ""
        ids, added = self._backend.encode(tail, add_special_tokens=False).ids, self._backend.get_added_tokens_decoder()
        # Tokens that someone added by hand are often not marked as special.
        for i in (*(i for i in ids if i in self.special), *(i for i in ids if i in added)):
            return i, added[i].content
        what = "the chat template ends an assistant turn with no special token, so no model could learn where to stop"
        raise InputError(what, where, INSTRUCT)


@contextmanager
def _limited() -> Iterator[None]:
    """Raises TimeoutError inside after `LIMIT`, where that is possible: in the main thread, if nobody uses the timer."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getitimer(signal.ITIMER_REAL)[0] or signal.getsignal(signal.SIGALRM) is None:
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"it takes longer than {LIMIT:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def common_prefix(a: str, b: str) -> int:
    """Characters that `a` and `b` have in common at their start."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def load_chat_tokenizer(ref: str) -> ChatTokenizer:
    """The tokenizer `ref` names ("byte", a folder with tokenizer.json, a hub id) and its chat template.

    Raises:
        InputError: as `load_tokenizer`; no chat template, or one that fails or never ends a turn.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_tokenizer(ref)
    if not isinstance(tokenizer, HfTokenizer):
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(byte_files()["tokenizer.json"])
        eos, pad = tokenizer.decode([tokenizer.eod]), "<|pad|>"
        pretrained = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=eos, pad_token=pad, chat_template=BYTE_TEMPLATE
        )
        return ChatTokenizer(tokenizer, backend, pretrained)
    if not Path(ref).expanduser().exists():
        _fetch_template(ref)
    try:
        pretrained = PreTrainedTokenizerFast.from_pretrained(tokenizer.location)
    except Exception as error:  # broken side files: many classes
        raise InputError(f"transformers cannot read this tokenizer: {error}", tokenizer.location, INSTRUCT) from None
    return ChatTokenizer(tokenizer, tokenizer.backend, pretrained)


def _fetch_template(ref: str) -> None:
    """Newer repositories keep the template in a file of its own, beside tokenizer.json in the hub's cache."""
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(ref, "chat_template.jinja")
    except (hub.EntryNotFoundError, hub.OfflineModeIsEnabled, OSError):
        pass  # optional; a tokenizer without any template is refused by name
