"""Prompts to ids, and tokens to the terminal as they come: the working half of `infir2 generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .output import say, say_part

if TYPE_CHECKING:
    from infir2_core.data.prompts import Prompt, TextStream
    from infir2_core.data.tokenizer import Tokenizer
    from infir2_core.model.generate import Finish, Generator, Sampling

TITLE = 60  # characters of a prompt that head what follows it


def encode(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, chat: bool | None, system: str | None, positions: int
) -> list[list[int]]:
    """Ids of each prompt.

    Args:
        chat: whether texts are a user's turn; None: if the tokenizer has a chat template.
        system: message put before every chat that has none.
        positions: of the model.

    Raises:
        InputError: no template, one that fails, or a prompt without tokens or too long for the model; naming it.
    """
    from infir2_core.data.prompts import Chat, has_template
    from infir2_core.errors import InputError

    wraps = has_template(tokenizer) if chat is None else chat
    template = Chat(tokenizer) if wraps or system is not None else None
    found = []
    for prompt in prompts:
        messages = prompt.content
        if template is None:
            if not isinstance(messages, str) or prompt.tools:
                kind = "tools" if isinstance(messages, str) else "chat messages"
                what = f"these are {kind}, and they are not to be wrapped in a chat template"
                raise InputError(what, prompt.where, "--chat, with a tokenizer that has a template")
            ids = tokenizer.encode(messages)
        else:
            if isinstance(messages, str) and not messages.strip():  # training leaves out users who say nothing
                raise InputError("the prompt is empty", prompt.where, "give it some text")
            messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
            if system is not None and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system}, *messages]
            ids = template.encode(messages, prompt.where, prompt.tools)
        if not ids:
            raise InputError("the prompt is empty", prompt.where, "give it some text")
        if len(ids) >= positions:
            what = f"the prompt has {len(ids):,} tokens, the model {positions:,} positions"
            raise InputError(what, prompt.where, "shorten it: at least one position must be left")
        found.append(ids)
    return found


@dataclass
class _Answer:
    """What has come for one prompt."""

    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    seconds: float = 0.0


class Screen:
    """Shows answers in the order of their prompts: one as it comes, those after it when their turn has come."""

    def __init__(self, prompts: Sequence[Prompt], answers: Sequence[_Answer]) -> None:
        self._prompts, self._answers, self._turn = prompts, answers, 0
        self._head()

    def show(self, number: int, piece: str) -> None:
        """A piece of text, which is part of the answer already."""
        if number != self._turn:
            return
        say_part(piece)
        while self._turn < len(self._answers) and self._answers[self._turn].finish is not None:
            say_part("" if self._answers[self._turn].text.endswith("\n") else "\n")
            self._turn += 1
            if self._turn < len(self._answers):
                self._head()
                say_part(self._answers[self._turn].text)

    def _head(self) -> None:
        if len(self._prompts) > 1:
            content = self._prompts[self._turn].content
            text = content if isinstance(content, str) else str(content[-1].get("content", ""))
            title = " ".join(text.split())
            say(f"--- {self._turn + 1}: {title[:TITLE]}{'...' if len(title) > TITLE else ''} ---", style="bold")


def run(
    generator: Generator, prompts: Sequence[Prompt], ids: list[list[int]], settings: Sampling, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Generates and shows; what `--json` says of each prompt.

    Raises:
        InputError: the model computes NaN.
        MachineError: not enough memory on the GPU.
    """
    import torch

    from infir2_core.data.prompts import TextStream
    from infir2_core.errors import InputError, MachineError

    answers = [_Answer(TextStream(tokenizer)) for _ in prompts]
    screen, began = Screen(prompts, answers), time.perf_counter()
    try:
        for token in generator.stream(ids, settings):
            if token.logprob != token.logprob:
                hint = "use a checkpoint from before it diverged, or --recipe bf16"
                raise InputError("the model's logits are not numbers", prompts[token.prompt].where, hint)
            answer = answers[token.prompt]
            answer.tokens.append(token.token)
            answer.logprobs.append(token.logprob)
            piece = "" if token.finish == "stop" else answer.stream.add(token.token)
            if token.finish is not None:
                piece += answer.stream.end()
                answer.finish, answer.seconds = token.finish, time.perf_counter() - began
            answer.text += piece
            screen.show(token.prompt, piece)
    except torch.OutOfMemoryError as error:
        what = f"out of memory: {str(error).splitlines()[0]}"
        raise MachineError(what, "generating", "lower --batch or --max-new-tokens") from error
    return [_as_dict(*each) for each in zip(prompts, ids, answers, strict=True)]


def _as_dict(prompt: Prompt, ids: list[int], answer: _Answer) -> dict[str, Any]:
    return {
        "prompt": prompt.content,
        "prompt_tokens": ids,
        "text": answer.text,
        "tokens": answer.tokens,
        "logprobs": answer.logprobs,
        "finish": answer.finish,
        "seconds": answer.seconds,
        "tok_per_s": len(answer.tokens) / answer.seconds,
    }
