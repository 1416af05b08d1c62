"""The flat batch: every sequence of a microbatch, one after the other, with no padding.

CPT makes one sequence per row; packed fine-tuning makes many. Models see only this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Batch:
    """One microbatch of T tokens.

    Attributes:
        tokens_T: int64 input ids.
        targets_T: int64 ids to predict.
        weights_T: float32 loss weights, 0 where a token is not trained on.
        positions_T: int64, restarting at 0 in each sequence.
        lengths: tokens of each sequence, on the host, so that attention never waits for the device.
    """

    tokens_T: Tensor
    targets_T: Tensor
    weights_T: Tensor
    positions_T: Tensor
    lengths: tuple[int, ...]

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [sequences + 1] cumulative lengths, as variable-length attention kernels take them."""
        return torch.tensor([0, *self.lengths], dtype=torch.int32, device=self.tokens_T.device).cumsum(
            0, dtype=torch.int32
        )

    def to(self, device: str | torch.device) -> Batch:
        """The same batch on another device; copies from pinned memory overlap with compute."""

        def move(tensor: Tensor) -> Tensor:
            if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
                tensor = tensor.pin_memory()  # from other memory the copy would wait for the device
            return tensor.to(device, non_blocking=True)

        tensors = (self.tokens_T, self.targets_T, self.weights_T, self.positions_T)
        tokens, targets, weights, positions = map(move, tensors)
        return Batch(tokens, targets, weights, positions, self.lengths)


def rows_to_batch(rows: Sequence[Tensor]) -> Batch:
    """A batch from token rows, each one sequence of length n + 1: inputs are its first n tokens, targets its last n."""
    tokens = torch.cat([row[:-1] for row in rows])
    targets = torch.cat([row[1:] for row in rows])
    positions = torch.cat([torch.arange(len(row) - 1) for row in rows])
    lengths = tuple(len(row) - 1 for row in rows)
    return Batch(tokens, targets, torch.ones(len(tokens)), positions, lengths)


def filled(batch: Batch, size: int) -> Batch:
    """The batch with one more sequence, of weight 0, that makes its tokens `size`.

    FP8 kernels cut the tokens of a microbatch into blocks. Of the fillers, which are all id 0, no token sees anything
    and no gradient comes. Only where a recipe gives several tokens one scale do they count in its amax: in wgrad's
    blocks along the tokens, as other samples do, and with one scale for a whole tensor everywhere.
    """
    short = size - len(batch.tokens_T)
    if not short:
        return batch
    zeros = torch.zeros(short, dtype=torch.int64)
    return Batch(
        torch.cat([batch.tokens_T, zeros]),
        torch.cat([batch.targets_T, zeros]),
        torch.cat([batch.weights_T, torch.zeros(short)]),
        torch.cat([batch.positions_T, torch.arange(short)]),
        (*batch.lengths, short),
    )
