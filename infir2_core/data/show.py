"""What is in a corpus: documents as the model will see them, counts, and how long documents are. And, of chat data, one
sample with what is trained of it.

Documents are read back from the stored ids and decoded, so what is shown is what was tokenised, not what the source
said. Where a token can hold several characters its end is marked with `BORDER`; the end of a document appears as the
tokenizer's own name for it. Drawing is left to the command; this module returns plain data.
"""

from __future__ import annotations

from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from infir2_core.data.chat_record import SampleError
from infir2_core.data.chat_source import Bad, chat_files, place, read_chat
from infir2_core.data.prefixes import Index, describe_prefix, read_index
from infir2_core.data.tokenizer import BYTE, Tokenizer, load_tokenizer
from infir2_core.errors import InputError

BORDER = "\N{BROKEN BAR}"


def summarise(prefix: str, documents: int = 3, most_tokens: int = 256) -> dict[str, Any]:
    """Describe the corpus at `prefix`.

    Args:
        documents: how many documents to show, from the start.
        most_tokens: tokens shown of each; the last one, its end, is always among them.

    Returns:
        `describe_prefix`, and: lengths {shortest, median, mean, longest} in tokens, histogram (list of {from, to,
        documents, tokens}; `from` included, `to` not), samples (list of {document, tokens, left_out, ids, text}).
        `text` is None, with `note` saying why, when the tokenizer is unknown or not to be had.

    Raises:
        InputError: as `describe_prefix`.
    """
    facts, index = describe_prefix(prefix), read_index(prefix)
    lengths = index.lengths_N
    tokenizer, note = _tokenizer(facts["made"])
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    count = min(documents, len(lengths))
    return {
        **facts,
        "note": note,
        "lengths": {
            "shortest": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "longest": int(lengths.max()),
        },
        "histogram": histogram(lengths),
        "samples": [_sample(index, n, int(starts[n]), tokenizer, most_tokens) for n in range(count)],
    }


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Documents and tokens by length, in ranges that double (0, 1, 2-3, 4-7, ...), from the shortest to the longest."""
    bits = np.frexp(lengths.astype(np.float64))[1]  # 0 for 0, else the number of bits
    documents = np.bincount(bits)
    tokens = np.bincount(bits, weights=lengths)
    return [
        {"from": 1 << (b - 1) if b else 0, "to": 1 << b, "documents": int(documents[b]), "tokens": int(tokens[b])}
        for b in range(int(bits.min()), len(documents))
    ]


def _tokenizer(made: dict[str, Any] | None) -> tuple[Tokenizer | None, str]:
    if made is None:
        return None, "no .json beside this corpus says which tokenizer made it: ids are shown"
    try:
        tokenizer = load_tokenizer(made["tokenizer"]["ref"])
    except InputError as error:
        return None, f"its tokenizer cannot be loaded ({error.what}): ids are shown"
    if tokenizer.digest != made["tokenizer"]["digest"]:
        return None, f"the tokenizer {tokenizer.ref} has changed since this corpus was made: ids are shown"
    return tokenizer, ""


def _sample(index: Index, number: int, start: int, tokenizer: Tokenizer | None, most: int) -> dict[str, Any]:
    length = int(index.lengths_N[number])
    ids = index.token_array()[start : start + length].tolist()
    left_out = max(0, length - most)
    head, end = (ids[: most - 1], ids[-1:]) if left_out else (ids, [])
    text = None
    if tokenizer is not None:
        text = _marked(tokenizer, head) + (
            f" [... {left_out:,} tokens ...] " + _marked(tokenizer, end) if left_out else ""
        )
    return {"document": number, "tokens": length, "left_out": left_out, "ids": head + end, "text": text}


def _marked(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids) if tokenizer.location == BYTE else BORDER.join(tokenizer.pieces(ids))


def show_chat(path: Path, tokenizer_ref: str, index: int) -> dict[str, Any]:
    """One record of chat data as it is trained.

    Args:
        path: a file or folder; see `chat_files`.
        tokenizer_ref: see `load_chat_tokenizer`.
        index: which record of all files, counted from 0; bad ones count too.

    Returns:
        index, where, layout, messages (their number), tokens, trained_tokens, turn_end, turn_end_id, folded (see
        `ChatTokenizer.folds`), ids, trained (a bool for each id), parts (runs of {trained, text}).

    Raises:
        InputError: as `chat_files` and `load_chat_tokenizer`; no such record, or a bad one.
    """
    from infir2_core.data.chat_template import load_chat_tokenizer

    files = chat_files(path)
    record = next(islice(read_chat(files), index, None), None)
    if record is None:
        raise InputError(f"there is no record {index:,}", str(path), "give a smaller --index; the first is 0")
    where = place(files[record.file], record.line)
    if isinstance(record, Bad):
        raise InputError(f"{record.kind}: {record.detail}", where, "mend it, or show another one with --index")
    chat, said = load_chat_tokenizer(tokenizer_ref), record.said
    try:
        ids, mask = chat.encode_chat(said.messages, said.tools)
    except SampleError as error:
        raise InputError(str(error), where, "mend it, or show another one with --index") from None
    runs = [(trained, [int(i) for i, _ in run]) for trained, run in groupby(zip(ids, mask, strict=True), lambda t: t[1])]
    return {
        "index": index,
        "where": where,
        "layout": said.layout,
        "messages": len(said.messages),
        "tokens": len(ids),
        "trained_tokens": int(mask.sum()),
        "turn_end": chat.turn_end,
        "turn_end_id": chat.turn_end_id,
        "folded": chat.folds(said.messages),
        "ids": ids.tolist(),
        "trained": mask.tolist(),
        "parts": [{"trained": bool(trained), "text": chat.tokenizer.decode(run)} for trained, run in runs],
    }
