"""Prompts in, text out: files of prompts, chat templates, and tokens that become text as they come.

A prompt is a text that the model continues, or a list of chat messages that the tokenizer's own template turns into
text. transformers renders the template; ids come from `Tokenizer.encode`, in which special tokens that the template
writes out get their own id.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from .chat_record import SampleError, is_text, one_form, schemas
from .sources import JSONL
from .tokenizer import BYTE, Tokenizer

Messages = list[dict[str, Any]]
CUT = "\ufffd"  # what decoding puts in the place of bytes that are no whole character


@dataclass(frozen=True)
class Prompt:
    """A text or chat messages, where it was found, as shown in errors, and schemas of tools for the template."""

    content: str | Messages
    where: str
    tools: list[Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.content, str) and not is_text(self.content):
            raise InputError("the prompt is not text: it holds half a surrogate pair", self.where, "mend it")


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: one a line, or with the suffix .jsonl (or .ndjson) one object a line, with `prompt` or
    `messages`, and `tools` beside them.

    Raises:
        InputError: no such file, not UTF-8, no prompt in it, or a line that is not such an object (naming it).
    """
    where, is_json = f"--file {path}", path.suffix in JSONL
    try:
        lines = _lines(path) if is_json else path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise InputError("there is no such file", where, "check the path") from None
    except IsADirectoryError:
        raise InputError("this is a folder, expected a file of prompts", where, "give a .txt or .jsonl file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason} at byte {error.start}", where, "save it as UTF-8") from None
    read = _from_json if is_json else Prompt
    found = [read(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        hint = 'one prompt a line, or in a .jsonl file objects such as {"prompt": "Hello"}'
        raise InputError("there is no prompt in this file", where, hint)
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8-sig").split("\n")  # JSON strings may hold what splitlines takes for line ends


def _from_json(line: str, where: str) -> Prompt:
    hint = 'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", where, hint) from None
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise InputError("expected an object with either 'prompt' or 'messages'", where, hint)
    if "prompt" in record:
        if not isinstance(record["prompt"], str) or not record["prompt"]:
            raise InputError("'prompt' must be a text that is not empty", where, hint)
        return Prompt(record["prompt"], where, _tools(record, where))
    if not isinstance(record["messages"], list) or not record["messages"]:
        raise InputError("'messages' must be a list of objects with 'role' and 'content'", where, hint)
    try:
        messages = one_form(record["messages"])
    except SampleError as error:
        raise InputError(str(error), where, hint) from None
    if messages[-1]["role"] == "assistant":
        raise InputError("the last message is the assistant's: there is nothing to answer", where, "leave it out")
    return Prompt(messages, where, _tools(record, where))


def _tools(record: dict[str, Any], where: str) -> list[Any] | None:
    try:
        return schemas(record.get("tools"))
    except SampleError as error:
        raise InputError(str(error), where, "write 'tools' as a list of schemas, or leave it out") from None


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's folder has a chat template. The byte tokenizer's own is only asked for by name."""
    if tokenizer.location == BYTE:
        return False
    folder = Path(tokenizer.location)
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    try:
        return config.is_file() and bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template"))
    except (ValueError, AttributeError):
        return False


class Chat:
    """Messages to ids by a tokenizer's own template.

    Raises:
        InputError: the tokenizer has no template, or one that ends no turn.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from .chat_template import load_chat_tokenizer

        try:
            self._chat = load_chat_tokenizer(tokenizer.location)
        except InputError as error:
            hint = "--raw to continue the text as it is, or --tokenizer of an Instruct model"
            raise InputError(error.what, f"--chat: {tokenizer.location}", hint) from error

    def encode(self, messages: Messages, where: str, tools: list[Any] | None = None) -> list[int]:
        """Ids of the messages and of what opens the assistant's turn.

        Raises:
            InputError: the template fails on these messages; `where` is shown.
        """
        try:
            ids: list[int] = self._chat.encode_prompt(messages, tools).tolist()
        except SampleError as error:
            what = f"the chat template fails on this prompt: {error}"
            raise InputError(what, where, "check the roles and contents of the messages") from error
        return ids


class TextStream:
    """Text of tokens that come one by one, never half a character; the pieces together are the text of them all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # of the last piece, as context, and of what has not been shown
        self._shown = 0  # tokens of `_ids` that have been

    def add(self, token: int) -> str:
        """The text that is complete with this token; empty while a character is cut."""
        self._ids.append(token)
        return self._take(final=False)

    def end(self) -> str:
        """What is left, cut characters replaced."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._shown])
        text = self._tokenizer.decode(self._ids)
        if not final and text.endswith(CUT):
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return text[len(before) :]

