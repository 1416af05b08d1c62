"""Formats against torch's own FP8 types, exhaustively, and against the OCP tables."""

import math

import pytest
import torch

from infir2_core.ops.reference.codes import DTYPES, cast, decode
from infir2_core.precision.spec import parse_format

ALL = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_decodes_as_torch_and_as_the_format_says(name: str, dtype: torch.dtype) -> None:
    codes = ALL.view(DTYPES[name])
    ours, theirs = decode(codes, dtype), codes.to(dtype)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    table = torch.tensor(parse_format(name).values(), dtype=dtype)
    assert torch.equal(table.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert torch.equal(torch.signbit(table[~table.isnan()]), torch.signbit(theirs[~theirs.isnan()]))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_cast_rounds_to_nearest_even_at_every_code_and_midpoint(name: str) -> None:
    fmt = parse_format(name)
    finite = sorted({v for v in fmt.values() if math.isfinite(v) and v >= 0})
    codes = {v: c for c, v in reversed(list(enumerate(fmt.values()))) if math.isfinite(v) and c < 128}
    values = torch.tensor(finite)
    assert torch.equal(
        cast(values.clone(), name).view(torch.uint8), torch.tensor([codes[v] for v in finite], dtype=torch.uint8)
    )
    for low, high in zip(finite, finite[1:], strict=False):
        middle = (low + high) / 2
        even = low if codes[low] % 2 == 0 else high
        probe = torch.tensor(
            [middle, math.nextafter(middle, 0), math.nextafter(middle, math.inf)], dtype=torch.float64
        ).float()
        probe[1], probe[2] = torch.nextafter(probe[0], torch.tensor(0.0)), torch.nextafter(probe[0], torch.tensor(1e9))
        expected = [codes[even], codes[low], codes[high]]
        assert cast(probe.clone(), name).view(torch.uint8).tolist() == expected, (low, high)
        assert cast(-probe, name).view(torch.uint8).tolist() == [c + 128 for c in expected]


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_cast_saturates_and_keeps_nan(name: str) -> None:
    limit = parse_format(name).max
    x = torch.tensor([limit * 1.01, limit * 1e6, math.inf, -math.inf, math.nan])
    values = decode(cast(x, name), torch.float32)
    assert values[:4].tolist() == [limit, limit, limit, -limit]
    assert values[4].isnan()


def test_known_largest_values() -> None:
    known = {"e4m3": 448, "e5m2": 57344, "e2m1": 6, "e3m2": 28, "e2m3": 7.5, "int8": 127, "int4": 7}
    assert {name: parse_format(name).max for name in known} == known
    assert sorted({abs(v) for v in parse_format("e2m1").values()}) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("name", ["e9m3", "m3e4", "fp8", "int9"])
def test_unknown_formats_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        parse_format(name)
