"""How optimizer state is stored in fewer bits than float32: E4M3 codes of moments, and masters split in two halves.

Moments in E4M3: one float32 decode scale for each 1x128 block, stochastic rounding (an exponential average moves by
less than half a code in most steps, and rounding to nearest would lose every such step). A spec with a `power`
transform of exponent 1/2 stores the square root, which halves the range that a second moment spans. Its rounding is
unbiased in the *square*: unbiased in the root, each step would add the variance of its rounding to the decoded average,
which then stands 3 % (beta2 = 0.95) to 5 % (0.999) too high.

A master split in two: the bfloat16 weight that the model computes with, and the 16 bits that it lacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...precision.spec import QSpec
from .codes import decode
from .stochastic import random_bits, uniform

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: a smaller scale would lose bits, or be 0


def fits(shape: torch.Size) -> bool:
    """Whether a tensor of this shape may be stored in 1x128 blocks: a matrix whose rows divide by 128."""
    return len(shape) == 2 and shape[1] % BLOCK == 0


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded float32 root, by way of float64: torch's vectorised one misses the last bit now and then."""
    return x.double().sqrt().float()


def encode_moment(x: Tensor, spec: QSpec, key: int | Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Codes and decode scales of a moment.

    With r = x, or the float32 root of x >= 0 when `spec.root`; every line is one float32 rounding:

        scale = max(amax / 448, 2**-126) of each block; 1 for a block of zeros
        s     = |r| * (1 / scale)                          the inverse once for a block
        e     = max(exponent of s, -6)                     E4M3 has subnormals below 2**-6
        q     = s * 2**(3 - e)                             exact; in units of the last place
        n     = floor(q), f = q - n
        up    = u < f, with root u * (2 n + 1) < f * (2 n + f)   the probability that keeps the mean, of the square
        code  = min(8 (e + 6) + n + up, 126), at least 1 for a positive x with root

    u is `uniform` of the element's random bits. The sign of r is the upper bit of the code.

    Args:
        x: float32 [R, C], C a multiple of 128, finite; not negative with `spec.root`.
        spec: E4M3 in 1x128 blocks.
        key: from `stochastic.key`.
        start: index of the first element of x within the tensor that is stored piece by piece.

    Returns:
        float8_e4m3fn [R, C] and float32 [R, C / 128].
    """
    r = sqrt(x) if spec.root else x
    magnitude = r.abs().view(r.shape[0], -1, BLOCK)
    amax = magnitude.amax(2)
    scale = torch.where(amax > 0, (amax / E4M3_MAX).clamp(min=SMALLEST_SCALE), 1.0)
    scaled = (magnitude * (1 / scale)[:, :, None]).view(r.shape)
    e = ((scaled.view(torch.int32) >> 23) - 127).clamp(min=-6)
    q = scaled * ((130 - e) << 23).view(torch.float32)
    n = q.floor()
    f, u = q - n, uniform(random_bits(x, key, start))
    up = u * (2 * n + 1) < f * (2 * n + f) if spec.root else u < f
    code = (8 * (e + 6) + n.int() + up.int()).clamp(max=126)
    if spec.root:
        code = torch.where(x > 0, code.clamp(min=1), code)
    code |= (r.view(torch.int32) >> 24) & 0x80
    return code.to(torch.uint8).view(torch.float8_e4m3fn), scale


def decode_moment(codes: Tensor, scale: Tensor, spec: QSpec) -> Tensor:
    """float32 values of what `encode_moment` made: code times scale, squared with `spec.root`."""
    values = decode(codes, torch.float32).view(codes.shape[0], -1, BLOCK) * scale[:, :, None]
    values = values.view(codes.shape)
    return values * values if spec.root else values


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 weight and the remainder of a float32 master; `join` gives it back bit for bit.

    The bits of the master, as an integer, are (weight bits << 16) + remainder: the weight is the master rounded to
    nearest, halfway cases away from zero (to even would need a remainder of +32768). Masters within half a bfloat16
    step of float32's largest value have an infinite weight, as in any rounding to nearest. A NaN is restored as well,
    but its weight alone need not be one.

    Args:
        master: float32, any shape.

    Returns:
        bfloat16 and int16 of that shape.
    """
    raw = master.view(torch.int32)
    weight = (raw + 0x8000) >> 16
    return weight.to(torch.int16).view(torch.bfloat16), raw.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a bfloat16 weight and its int16 remainder."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)
