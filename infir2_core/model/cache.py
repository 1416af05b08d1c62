"""Keys and values of sequences that grow, and the attention that reads them: what generation adds to the decoder.

Rows 0 to n - 1 hold the n sequences that are alive, so that a step computes a slice and nothing for those that ended:
the last row moves into the place of one that leaves. Room for tokens is added in blocks. On a CPU everything is
float32, which the attention there computes in. Tensor letters as in decoder.py; B rows, S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..config.schema import ModelShape
from ..ops.attention import self_attention
from ..ops.reference.attention import cached_attention
from .decoder import Attention

BLOCK = 256  # tokens by which every row's room grows
SPAN = 64  # a step reads keys up to a multiple of this


class Cache:
    """Room for `rows` sequences of one `Decoder`.

    `prefill` and `decode` announce what the next forward holds and give the attention of each of its blocks. Tokens of
    that forward behind the announced ones are padding: nothing is kept of them.

    Attributes:
        lengths: tokens of each live sequence, on the host.
    """

    def __init__(self, shape: ModelShape, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.lengths: list[int] = []
        dtype = torch.float32 if device.type == "cpu" else dtype
        empty = torch.zeros(rows, shape.kv_heads, 0, shape.head_dim, dtype=dtype, device=device)
        self._keys, self._values = [empty] * shape.layers, [empty] * shape.layers

    def prefill(self, lengths: Sequence[int]) -> list[Attention]:
        """For a packed forward over new sequences, which become the last rows."""
        first = len(self.lengths)
        self.lengths += lengths
        self._make_room()

        def attend(layer: int, heads_TNd: Tensor, heads: int, kv_heads: int, packed: tuple[int, ...]) -> Tensor:
            _, k, v = heads_TNd.split([heads, kv_heads, kv_heads], dim=1)
            start = 0
            for row, length in enumerate(lengths, first):
                for kept, fresh in ((self._keys[layer], k), (self._values[layer], v)):
                    kept[row, :, :length] = fresh[start : start + length].transpose(0, 1)
                start += length
            return self_attention(heads_TNd, heads, kv_heads, packed)

        return [partial(attend, layer) for layer in range(len(self._keys))]

    def decode(self) -> list[Attention]:
        """For a forward over one more token of every live sequence, in the order of the rows."""
        self.lengths = [length + 1 for length in self.lengths]
        self._make_room()
        count, span = len(self.lengths), -(-max(self.lengths) // SPAN) * SPAN
        device = self._keys[0].device
        length_B = torch.tensor(self.lengths, device=device)
        seen_BS = torch.arange(span, device=device) < length_B[:, None]
        rows_B = torch.arange(count, device=device)

        def attend(layer: int, heads_TNd: Tensor, heads: int, kv_heads: int, packed: tuple[int, ...]) -> Tensor:
            q, k, v = heads_TNd[:count].split([heads, kv_heads, kv_heads], dim=1)
            keys, values = self._keys[layer], self._values[layer]
            keys[rows_B, :, length_B - 1] = k.to(keys.dtype)
            values[rows_B, :, length_B - 1] = v.to(values.dtype)
            out = cached_attention(q.contiguous(), keys[:count, :, :span], values[:count, :, :span], seen_BS)
            return torch.cat([out, out.new_zeros(len(heads_TNd) - count, *out.shape[1:])])

        return [partial(attend, layer) for layer in range(len(self._keys))]

    def drop(self, row: int) -> None:
        """Takes a sequence out; the last row is `row` afterwards."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[row] = self.lengths[last]
            for kept in (*self._keys, *self._values):
                kept[row, :, :length] = kept[last, :, :length]
        self.lengths.pop()

    def _make_room(self) -> None:
        wanted = -(-max(self.lengths) // BLOCK) * BLOCK
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                rows, kv_heads, room, width = old.shape
                if wanted > room:
                    # Zeros, because what a row has not seen is multiplied by zero and must not be a NaN.
                    tensors[layer] = old.new_zeros(rows, kv_heads, wanted, width)
                    tensors[layer][:, :, :room] = old
