"""Samples of different lengths into rows of a fixed budget of tokens, and rows into flat batches.

Nothing is ever padded: a row is the samples in it, one after the other, each with positions of its own, and attention
does not cross from one to the next. What packing decides is how full the rows are, and so how even the work of
microbatches is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from infir2_core.data.batch import Batch, rows_to_batch
from infir2_core.data.chat_set import ChatSample


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Best-fit decreasing: the longest sample goes first, each into the fullest row that still takes it.

    Uses at most 11/9 of the fewest possible rows, and four more (Johnson, 1974). Takes O(n log n) for n samples: the room
    left in open rows is a set of bits, in which the smallest sufficient one is found by a shift and two operations on
    capacity / 64 words.

    Args:
        lengths: tokens of each sample.
        capacity: tokens of a row.

    Returns:
        The sample numbers of each row. The same lengths always give the same rows.

    Raises:
        ValueError: a sample is longer than a row, or not longer than 0.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # room left -> rows
    rooms = 0  # bit r is set while a row has room for exactly r > 0 more tokens
    sizes = np.asarray(lengths, np.int64)
    if len(sizes) and not (0 < sizes.min() and sizes.max() <= capacity):
        raise ValueError(f"samples of {sizes.min()} to {sizes.max()} tokens, rows of {capacity}")
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        if left := room - size:
            open_rows.setdefault(left, []).append(row)
            rooms |= 1 << left
    return rows


def packed_batch(samples: Sequence[ChatSample]) -> Batch:
    """One flat batch of `samples`: each is a sequence of its own, with its own positions and loss weights."""
    batch = rows_to_batch([sample.tokens for sample in samples])
    batch.weights_T = torch.cat([sample.weights for sample in samples])
    return batch


def unfilled_share(lengths: Sequence[int] | np.ndarray, rows: Sequence[Sequence[int]], capacity: int) -> float:
    """Share of the rows' tokens that no sample fills: 1 - tokens / (rows * capacity)."""
    return 1 - int(sum(lengths)) / (len(rows) * capacity)


def padded_share(lengths: Sequence[int] | np.ndarray, batch: int) -> float:
    """Share of padding in batches of `batch` samples in the order given, each padded to its longest sample."""
    sizes = np.asarray(lengths, np.int64)
    slots = sum(len(part) * int(part.max()) for part in (sizes[i : i + batch] for i in range(0, len(sizes), batch)))
    return 1 - int(sizes.sum()) / slots
