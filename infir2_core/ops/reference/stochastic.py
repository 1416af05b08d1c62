"""Stochastic rounding without a random state: the bits come from a hash of where and when a value is rounded.

    mix(x)               32-bit integer hash ("lowbias32" of github.com/skeeto/hash-prospector)
    key(salt, a, b, ..)  k = salt; for each number n: k = mix(k xor n)     one per tensor and step
    bits(i)              mix(i xor key)                                    one per element; i counts them row by row

All arithmetic is modulo 2**32, so that a kernel repeats it with uint32. A resumed run draws the same bits, and so does
every data-parallel rank that rounds the same tensor.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
Word = TypeVar(
    "Word", int, Tensor
)  # a number below 2**32: a Python integer, or int64 where torch has no uint32 product


def mix(x: Word) -> Word:
    """A bijection of 32-bit words under which a change of one input bit changes every output bit half the time."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK
    return x ^ (x >> 16)


def key(salt: int, *numbers: Word) -> Word:
    """The word that stands for one rounding of a whole tensor.

    Args:
        salt: of the tensor, below 2**32.
        numbers: what tells the roundings of this tensor apart (optimizer step, microbatch ...), below 2**32 each:
            Python integers, or int64 scalars on a device; at least one.
    """
    word = mix(numbers[0] ^ salt)
    for number in numbers[1:]:
        word = mix(number ^ word)
    return word


def random_bits(like: Tensor, key: int | Tensor, start: int = 0) -> Tensor:
    """32 random bits for each element of `like`, as an int32 tensor of its shape and device.

    Args:
        like: any contiguous tensor of less than 2**31 elements.
        key: from `key`.
        start: index of its first element within the tensor that is being rounded piece by piece.
    """
    word = key.int() if isinstance(key, Tensor) else _signed(key)
    x = torch.arange(start, start + like.numel(), dtype=torch.int32, device=like.device)
    x ^= word  # from here on `mix`, whose shifts fill with zeros
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x.view(like.shape)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def uniform(bits: Tensor) -> Tensor:
    """The upper 24 of 32 random bits as a float32 in [0, 1)."""
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24


def round_bf16(x: Tensor, key: int | Tensor, start: int = 0) -> Tensor:
    """float32 to bfloat16, up or down with the probability that makes the mean exact.

    The upper 16 random bits are added to the bits of a finite value, then the lower 16 bits are cut off; infinities and
    NaNs stay what they are, or a NaN becomes an infinity.

    Args:
        x: float32, contiguous.
        key: from `key`.
        start: as in `random_bits`.
    """
    raw = x.view(torch.int32)
    noise = (random_bits(x, key, start) >> 16) & 0xFFFF
    finite = (raw & 0x7F800000) != 0x7F800000
    raw = torch.where(finite, raw + noise, raw)
    return (raw >> 16).to(torch.int16).view(torch.bfloat16)
