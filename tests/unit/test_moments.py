"""Storage forms of optimizer state against scalar oracles: random bits, roundings, E4M3 moments, split masters."""

from __future__ import annotations

import math
import struct
import zlib
from fractions import Fraction

import pytest
import torch

from infir2_core.ops.reference.moments import decode_moment, encode_moment, join, split
from infir2_core.ops.reference.stochastic import key, random_bits, round_bf16, uniform
from infir2_core.precision.spec import QSpec, Transform, parse_format

SPEC = QSpec(format="e4m3", block=(1, 128), scale="fp32", rounding="stochastic")
ROOT = SPEC.model_copy(update={"transforms": (Transform(kind="power", exponent=0.5, undo="on_read"),)})
GRID = sorted({v for v in parse_format("e4m3").values() if v >= 0 and math.isfinite(v)}) + [480.0]


def scalar_mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def word(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def test_bits_are_those_of_the_scalar_hash_on_any_path() -> None:
    salt, step = zlib.crc32(b"m/layers.0.qkv.weight"), 7
    assert key(salt, step) == scalar_mix(salt ^ step)
    assert key(salt, step, 3) == scalar_mix(scalar_mix(salt ^ step) ^ 3)
    on_device = key(salt, torch.tensor(step))
    assert int(on_device) == key(salt, step)
    x = torch.zeros(5, 128)
    bits = random_bits(x, on_device, start=1 << 29)
    expected = [scalar_mix(((1 << 29) + i) ^ key(salt, step)) for i in range(x.numel())]
    assert [b % 2**32 for b in bits.flatten().tolist()] == expected
    assert torch.equal(bits[2:], random_bits(x[2:], key(salt, step), start=(1 << 29) + 256))


def test_bits_look_random_along_elements_steps_and_tensors() -> None:
    """Mean, each of the 32 bits, and correlation of neighbours, next steps and other salts, over 2**20 draws."""
    x = torch.zeros(1 << 20)
    base = random_bits(x, key(11, 1))
    for bit in range(32):
        assert abs(((base >> bit) & 1).double().mean() - 0.5) < 5 * 0.5 / 2**10, bit
    u = uniform(base).double() - 0.5
    others = [u.roll(1), u.roll(128), *(uniform(random_bits(x, k)).double() - 0.5 for k in (key(11, 2), key(12, 1)))]
    assert abs(float(u.mean())) < 5 * 12**-0.5 / 2**10
    for other in others:
        assert abs(float((u * other).mean())) < 5 / 12 / 2**10
    assert 0 <= uniform(base).min() and uniform(base).max() < 1


def test_bf16_rounding_adds_sixteen_bits_and_cuts() -> None:
    special = [0.0, -0.0, 1.0, -1.0, 2.0**-140, -(2.0**-149), 3.3895e38, math.inf, -math.inf]
    x = torch.cat([torch.tensor(special), torch.randn(1000) * 10.0 ** torch.randint(-30, 30, (1000,))])
    rounded = round_bf16(x, key(5, 9), start=17).float()
    for i, (before, after) in enumerate(zip(x.tolist(), rounded.tolist(), strict=True)):
        raw = word(before)
        if math.isfinite(before):
            raw += scalar_mix((17 + i) ^ key(5, 9)) >> 16
        assert word(after) == raw & 0xFFFF0000
    # All NaNs of float32, the one that GPUs make (0x7FFFFFFF) too, stay non-finite.
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x400000], dtype=torch.int32).view(torch.float32)
    for step in range(20):
        assert not torch.isfinite(round_bf16(nans, key(5, step)).float()).any()


def test_bf16_rounding_is_unbiased() -> None:
    x = torch.tensor([1.0 + 2**-10, -3.1415926, 1e-20, 257.3]).double().float()
    draws = torch.stack([round_bf16(x, key(1, n)).double() for n in range(4096)])
    ulp = 2.0 ** (x.abs().log2().floor() - 7).double()
    assert ((draws.mean(0) - x.double()).abs() < 4 * ulp * 0.5 / 64).all()
    assert ((draws - x.double()).abs() < ulp).all()


def blocks(seed: int, positive: bool) -> torch.Tensor:
    """Rows whose blocks span few and many orders of magnitude, with zeros and a block of zeros."""
    torch.manual_seed(seed)
    x = torch.randn(6, 384) * 10.0 ** (torch.rand(6, 384) * torch.tensor([[0.0], [2], [6], [12], [30], [3]]) - 8)
    x[5, :128] = 0
    x[4, 7] = 0
    return x.abs() if positive else x


@pytest.mark.parametrize("spec", [SPEC, ROOT], ids=["plain", "root"])
def test_moment_codes_equal_a_search_over_the_format(spec: QSpec) -> None:
    x = blocks(0, spec.root)
    k = key(99, 3)
    codes, scale = encode_moment(x, spec, k, start=1000)
    raw, near = codes.view(torch.uint8), 0
    for r in range(6):
        for b in range(3):
            values = [float(v) for v in (x.double().sqrt().float() if spec.root else x)[r, 128 * b : 128 * b + 128]]
            amax = max(abs(v) for v in values)
            one = torch.tensor(amax) / 448
            expected = max(float(one), 2.0**-126) if amax else 1.0
            assert float(scale[r, b]) == expected
            for c, value in enumerate(values):
                at = 128 * b + c
                s = Fraction(float(torch.tensor(abs(value)) * (1 / torch.tensor(expected))))
                s = min(s, Fraction(448))
                i = max(j for j, grid in enumerate(GRID) if grid <= s)
                low, high = Fraction(GRID[i]), Fraction(GRID[min(i + 1, 127)])
                u = Fraction(scalar_mix((1000 + 384 * r + at) ^ k) >> 8, 1 << 24)
                p = (s**2 - low**2) / (high**2 - low**2) if spec.root else (s - low) / (high - low)
                code = min(i + (u < p), 126)
                if spec.root and value > 0:
                    code = max(code, 1)
                if spec.root and abs(u - p) < Fraction(1, 1 << 21):
                    near += 1  # the probability itself is rounded
                    continue
                assert int(raw[r, at]) == code | (0x80 if math.copysign(1, value) < 0 else 0), (r, at)
    assert near < 5


@pytest.mark.parametrize("spec", [SPEC, ROOT], ids=["plain", "root"])
def test_moments_come_back_unbiased(spec: QSpec) -> None:
    """Of the root too: it is the square that is unbiased, down to where codes run out; nothing positive becomes 0."""
    torch.manual_seed(3)
    x = torch.randn(4, 128) * torch.tensor([[1e-3], [1.0], [1e-9], [1e4]])
    x = x.square() if spec.root else x
    total, square, count = torch.zeros(4, 128).double(), torch.zeros(4, 128).double(), 4000
    for n in range(count):
        back = decode_moment(*encode_moment(x, spec, key(4, n)), spec).double()
        total, square = total + back, square + back * back
    mean = total / count
    error = (square / count - mean * mean).clamp(min=0).sqrt() / count**0.5
    assert ((mean - x).abs() <= 4.5 * error + 2e-6 * x.abs()).all()
    if spec.root:
        assert (back > 0).all()


@pytest.mark.parametrize("beta2,steps", [(0.95, 200), (0.98, 400), (0.999, 3000)])
def test_an_average_of_second_moments_keeps_its_level(beta2: float, steps: int) -> None:
    """v <- v beta2 + (1 - beta2) g**2 with stored v, against a control whose rounding is unbiased in the root."""

    def level(rooted: bool) -> float:
        torch.manual_seed(0)
        v, means = torch.ones(64, 128), []
        for n in range(steps):
            stored = encode_moment(v, ROOT, key(1, n)) if rooted else encode_moment(v.sqrt(), SPEC, key(1, n))
            v = decode_moment(*stored, ROOT) if rooted else decode_moment(*stored, SPEC).square()
            means.append(float(v.mean()))
            v = v * beta2 + torch.randn(64, 128).square() * (1 - beta2)
        return sum(means[steps // 2 :]) / (steps - steps // 2)

    assert level(rooted=True) == pytest.approx(1.0, abs=0.01)
    assert level(rooted=False) > 1.015


def test_a_positive_second_moment_is_never_stored_as_zero() -> None:
    x = torch.full((1, 128), 1e-30)
    x[0, 0], x[0, 1] = 1.0, 0.0
    for n in range(50):
        codes, scale = encode_moment(x, ROOT, key(2, n))
        assert codes.view(torch.uint8)[0, 2:].eq(1).all() and codes.view(torch.uint8)[0, 1] == 0
        assert float(decode_moment(codes, scale, ROOT)[0, 2]) == pytest.approx((2.0**-9 / 448) ** 2)


def test_a_split_master_comes_back_bit_for_bit() -> None:
    special = [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000]
    special += [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF]
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 1 << 32, (1 << 20,), generator=generator)
    raw = torch.cat([torch.tensor(special), words]).to(torch.int32)
    weight, remainder = split(raw.view(torch.float32))
    assert weight.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert torch.equal(join(weight, remainder).view(torch.int32), raw)
    upper, lower = weight.view(torch.int16).long(), remainder.long()
    assert torch.equal((upper * 65536 + lower) & 0xFFFFFFFF, raw.long() & 0xFFFFFFFF)
    # The weight is a nearest bfloat16: that of torch's cast, but for the cases halfway between two.
    value = raw.view(torch.float32)
    other = torch.isfinite(value) & (raw & 0xFFFF != 0x8000)
    assert torch.equal(weight[other].view(torch.int16), value[other].bfloat16().view(torch.int16))
    assert weight[len(special) - 4 : len(special) - 1].tolist() == [1.0078125, 1.015625, -1.0078125]
