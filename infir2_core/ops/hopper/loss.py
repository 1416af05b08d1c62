"""Logits into log-probabilities and gradients, in place (reference: `softmax_gradient_` of ops/reference/loss.py).

One program per token reads its row twice, the second time mostly from the L2 cache, and writes it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _softmax_gradient(logits, targets, weights, logprobs, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * VOCAB
    i = tl.arange(0, BLOCK)
    target = tl.load(targets + token)
    largest, total = -float("inf"), 0.0
    for start in range(0, VOCAB, BLOCK):
        value = tl.load(row + start + i, mask=start + i < VOCAB, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(value, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(value - new), 0)
        largest = new
    norm = largest + tl.log(total)
    tl.store(logprobs + token, tl.load(row + target).to(tl.float32) - norm)
    weight = tl.load(weights + token)
    tl.debug_barrier()  # the target's logit is read before any thread overwrites it
    for start in range(0, VOCAB, BLOCK):
        inside = start + i < VOCAB
        value = tl.load(row + start + i, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = weight * (tl.exp(value - norm) - (start + i == target).to(tl.float32))
        tl.store(row + start + i, gradient.to(tl.bfloat16), mask=inside)


def softmax_gradient_(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Log-probability of each target, float32 [T]; `logits` becomes weights * (softmax - onehot).

    Args:
        logits: bfloat16 [T, V], contiguous.
        targets: int64 [T].
        weights: float32 [T].
    """
    tokens, vocab = logits.shape
    logprobs = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    block = min(8192, triton.next_power_of_2(vocab))
    warps = max(1, min(16, block // 512))
    _softmax_gradient[(tokens,)](logits, targets, weights, logprobs, VOCAB=vocab, BLOCK=block, num_warps=warps)
    return logprobs
