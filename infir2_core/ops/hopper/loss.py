"""Logits into log-probabilities and gradients, in place (reference: `softmax_gradient_` of ops/reference/loss.py).

A row is read once and written once; between the two it stays on a multiprocessor (kernel: cuda/softmax_gradient.cu).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cuda import MULTIPROCESSORS, SHARED_BYTES, launch


@dataclass(frozen=True)
class Tuning:
    """How cuda/softmax_gradient.cu holds a row.

    Attributes:
        threads: of a block.
        room: vectors of 8 logits that a thread keeps in shared memory at most.
        hold: and in registers; what is left is read twice, the second time from the L2 cache.
    """

    threads: int = 512
    room: int = SHARED_BYTES // 16 // 512
    hold: int = 9


TUNING = Tuning()


def softmax_gradient_(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Log-probability of each target, float32 [T]; `logits` becomes weights * (softmax - onehot).

    Args:
        logits: bfloat16 [T, V], contiguous.
        targets: int64 [T], 0 to V - 1; the log-probability of any other is NaN.
        weights: float32 [T].
    """
    tokens, vocab = logits.shape
    by, logprobs = TUNING, torch.empty(tokens, dtype=torch.float32, device=logits.device)
    staged = 0 if vocab % 8 else min(by.room, -(-vocab // (8 * by.threads)))
    constants = {"VOCAB": vocab, "THREADS": by.threads, "ROOM": by.room, "HOLD": by.hold, "POW2": 1, "E5M2": 0}
    launch(
        "softmax_gradient.cu", tuple(sorted(constants.items())),
        max(1, min(tokens, MULTIPROCESSORS)), by.threads, 16 * staged * by.threads,
        (logits, targets, weights, logprobs, tokens), logits.device,
    )  # fmt: skip
    return logprobs
