"""What a run of fine-tuning has to know of its chats before it starts: how many, how long, of which content.

The chats are tokenised here, in the process that makes the plan, so that unusable data is refused before a run folder
exists; the ranks then find them in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..config.resolve_sft import Measured, Wanted
from ..config.schema import ChatData, ModelShape, SftSettings
from ..errors import InputError
from .chat_record import SampleError
from .chat_set import ChatSet, open_chat
from .chat_template import ChatTokenizer, load_chat_tokenizer


def open_whole(
    path: Path, tokenizer: str, sft: SftSettings, cache: Path, progress: Callable[[int], None] | None = None
) -> ChatSet:
    """The tokenised chats at `path`, held-out ones included; tokenised now unless they were before."""
    return open_chat(path, tokenizer, sft.max_tokens, sft.too_long, cache, sft.max_bad_share, progress)


def content(chats: ChatSet) -> str:
    """What a run keeps of the digest of its chats."""
    return chats.digest[:16]


def prompt_ids(tokenizer: ChatTokenizer, sft: SftSettings, model: ModelShape) -> list[list[int]]:
    """Ids of the prompts that the settings name, each a user's turn.

    Raises:
        InputError: a prompt that is empty, on which the template fails, or that leaves no room for an answer.
    """
    found, room = [], model.max_positions - sft.answer_tokens
    for text in sft.prompts:
        where = f"--prompt {text[:60]!r}"
        if not text.strip():
            raise InputError("the prompt is empty", where, "give it some text, or leave it out")
        try:
            ids: list[int] = tokenizer.encode_prompt([{"role": "user", "content": text}]).tolist()
        except SampleError as error:
            raise InputError(f"the chat template does not take this prompt: {error}", where) from error
        if len(ids) > room:
            what = f"the prompt has {len(ids)} tokens, {room} leave room for an answer"
            raise InputError(what, where, "shorten it, or lower --answer-tokens")
        found.append(ids)
    return found


def measure(wanted: Wanted, progress: Callable[[int], None] | None = None) -> Measured:
    """Tokenises the chats of a run, or finds them tokenised.

    Args:
        wanted: the chats, and what they are for.
        progress: told the records read so far.

    Raises:
        InputError: as `load_chat_tokenizer`, `prompt_ids` and `open_chat`; ids beyond the model's vocabulary.
    """
    tokenizer = load_chat_tokenizer(wanted.tokenizer)
    size = tokenizer.tokenizer.size
    if size > wanted.model.vocab:
        what = f"the tokenizer has {size:,} ids, the model's vocabulary {wanted.model.vocab:,}"
        raise InputError(what, wanted.where, "--tokenizer with the one that the weights were trained with")
    sft = wanted.settings
    prompt_ids(tokenizer, sft, wanted.model)
    chats = open_whole(wanted.data, wanted.tokenizer, sft, wanted.cache, progress)
    train, held = chats.split(sft.eval_share, sft.seed)
    lengths = train.lengths.astype(np.float64)
    data = ChatData(
        samples=len(train),
        held_out=len(held),
        tokens=int(lengths.sum()),
        trained_tokens=train.trained_tokens,
        context=round(float((lengths**2).sum() / lengths.sum()), 3),
        turn_end=tokenizer.turn_end_id,
    )
    return Measured(data, content(chats), tokenizer.tokenizer.location, chats.report.lines())
