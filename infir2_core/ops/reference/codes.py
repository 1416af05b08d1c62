"""Scales and codes: from a block's amax to its encode scale, from a scaled value to its code and back.

The power-of-two rule works on the bits of the float32 amax, so that every device gives the same scale. It is what
TransformerEngine's blockwise quantiser writes: encode scale 2**floor(log2(M / amax)) for a format whose largest value
is M = 1.75 * 2**k, that is exponent e = k - exponent(amax) - [mantissa(amax) > 0x600000], at most 127; 1 when amax is
zero or infinite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...precision.spec import QSpec, parse_format

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BF16_MAX = torch.finfo(torch.bfloat16).max


def encode_scale(amax: Tensor, spec: QSpec) -> tuple[Tensor, Tensor]:
    """Encode scale and its inverse, the decode scale that is stored.

    Args:
        amax: float32 tensor of any shape, values >= 0 (infinite allowed, NaN not).
        spec: its `scale` rule, format and headroom are used.

    Returns:
        Two float32 tensors of the shape of `amax`. For power-of-two rules their product is exactly 1.
    """
    limit = parse_format(spec.format).max * spec.headroom
    if spec.scale == "none":
        return torch.ones_like(amax), torch.ones_like(amax)
    if spec.scale == "fp32":
        # An encode scale that overflows is cut at bfloat16's largest value, the type of what is quantised (as TE does).
        # (scalar / tensor would be a reciprocal and a product: two roundings.)
        encode = (torch.full_like(amax, limit) / amax).clamp(max=BF16_MAX)
        encode = torch.where((amax == 0) | torch.isinf(amax), 1.0, encode)
        return encode, 1.0 / encode
    if spec.scale not in ("pow2", "e8m0"):
        raise ValueError(f"scale rule {spec.scale} has no implementation")
    mantissa, exponent = math.frexp(limit)
    limit_exponent, limit_bits = exponent - 1, int((2 * mantissa - 1) * (1 << 23))
    bits = amax.view(torch.int32)
    e = limit_exponent - ((bits >> 23) - 127) - ((bits & 0x7FFFFF) > limit_bits).int()
    e = e.clamp(max=127)
    if spec.scale == "pow2":
        e = torch.where((amax == 0) | torch.isinf(amax), 0, e)
    else:  # E8M0 holds 2**-127 .. 2**127: a zero block gets the smallest decode scale, an infinite one the largest
        e = torch.where(torch.isinf(amax), -127, e)
    return _power_of_two(e), _power_of_two(-e)


def _power_of_two(e: Tensor) -> Tensor:
    """2**e as float32 for integer e in [-127, 127]; 2**-127 is subnormal and built from its bits."""
    bits = torch.where(e > -127, (e + 127) << 23, 0x00400000)
    return bits.int().view(torch.float32)


def cast(scaled: Tensor, fmt: str) -> Tensor:
    """Round-to-nearest-even codes of already scaled float32 values, saturating; any NaN becomes the code 0x7F.

    torch's cast to E4M3 does not saturate, hence the clamp, and it keeps the sign of a NaN, which hardware does not.
    Overwrites `scaled`.
    """
    limit = parse_format(fmt).max
    codes = scaled.clamp_(-limit, limit).to(DTYPES[fmt])
    raw = codes.view(torch.uint8)
    raw.masked_fill_(raw == 0xFF, 0x7F)
    return codes


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of FP8 codes, exact in bfloat16 and float32.

    torch converts FP8 to wider types element by element on a CPU. There, the code's bits are moved to where bfloat16
    keeps them and the difference in exponent bias is multiplied back, which vectorises and is exact, subnormals too.
    """
    if codes.device.type != "cpu":
        return codes.to(dtype)
    raw = codes.view(torch.int8).to(torch.int16)
    if codes.dtype == torch.float8_e4m3fn:
        shifted, mask, factor, top = raw << 4, 0x87F0 - 0x10000, 2.0**120, 0x7F
    else:
        shifted, mask, factor, top = raw << 5, 0x8FE0 - 0x10000, 2.0**112, 0x7C
    value = shifted.bitwise_and_(mask).view(torch.bfloat16).to(dtype).mul_(factor)
    special = raw.bitwise_and_(0x7F)
    if int(special.max() if special.numel() else 0) >= top:  # NaN or infinity: rare, and never worth a slow common path
        value = torch.where(special >= top, codes.to(dtype), value)
    return value
