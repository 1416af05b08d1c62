"""The quantiser against what TransformerEngine wrote on an H200 (tests/data), a brute-force oracle, and its own
properties.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infir2_core.ops.reference.codes import decode, encode_scale
from infir2_core.ops.reference.quantize import QuantPlan, advance_state, block_amax, new_state, quantize, shifted
from infir2_core.precision.spec import QSpec

DATA = Path(__file__).parents[1] / "data"
ARCHIVES = [np.load(DATA / "te_blockwise.npz"), np.load(DATA / "te_edge.npz")]
CASES = {key.split("/")[0]: archive for archive in ARCHIVES for key in archive.files if not key.startswith("te_linear")}
WITH_FP32_CODES = ("normal", "wide", "outlier_rows")  # kept for three inputs only, to keep the archives small
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128)}


def golden(name: str, key: str) -> torch.Tensor:
    return torch.from_numpy(CASES[name][f"{name}/{key}"].copy())


def source(name: str) -> torch.Tensor:
    return golden(name, "x_bf16").view(torch.bfloat16)


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("block", sorted(BLOCKS))
def test_pow2_codes_and_scales_equal_transformer_engine_bit_for_bit(name: str, block: str) -> None:
    spec = QSpec(format="e4m3", block=BLOCKS[block], scale="pow2")
    made = quantize(source(name), QuantPlan(row=spec, col=spec))
    for way, ours in (("rowwise", made.row), ("columnwise", made.col)):
        assert ours is not None
        codes = golden(name, f"{block}/pow2/{way}_data")
        assert torch.equal(ours.codes.contiguous().view(torch.uint8), codes), way
        scales = golden(name, f"{block}/pow2/{way}_scale_inv")
        mine = ours.scale_inv.T if block == "1x128" else ours.scale_inv
        assert torch.equal(mine, scales[: mine.shape[0], : mine.shape[1]]), way


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("block", sorted(BLOCKS))
def test_fp32_scales_are_within_one_ulp_of_transformer_engine(name: str, block: str) -> None:
    """The GPU divides 448 by amax approximately. What is stored is the inverse of that quotient, so the stored value
    must be the inverse of our encode scale or of one of its two float32 neighbours."""
    spec = QSpec(format="e4m3", block=BLOCKS[block], scale="fp32")
    made = quantize(source(name), QuantPlan(row=spec, col=spec))
    for way, ours in (("rowwise", made.row), ("columnwise", made.col)):
        assert ours is not None
        mine = ours.scale_inv.T.contiguous() if block == "1x128" else ours.scale_inv.contiguous()
        theirs = golden(name, f"{block}/fp32/{way}_scale_inv")[: mine.shape[0], : mine.shape[1]]
        amax = block_amax(source(name).abs().nan_to_num(0.0, posinf=torch.inf), ours.tile)
        encode, _ = encode_scale(amax if block == "128x128" or way == "columnwise" else amax.T, spec)
        encode = encode.T if encode.shape != mine.shape else encode
        infinity = torch.full_like(encode, float("inf"))
        near = [1 / encode, 1 / torch.nextafter(encode, infinity), 1 / torch.nextafter(encode, -infinity)]
        assert torch.equal(near[0], mine)
        assert sum((theirs == candidate).int() for candidate in near).bool().all(), way
        if name not in WITH_FP32_CODES:
            continue
        codes = golden(name, f"{block}/fp32/{way}_data")
        equal = (ours.codes.contiguous().view(torch.uint8) == codes).float().mean().item()
        assert equal > 0.995, (way, equal)


@pytest.mark.parametrize("scale", ["pow2", "fp32", "e8m0"])
@pytest.mark.parametrize("fmt,limit", [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_scale_rules_against_exact_arithmetic(scale: str, fmt: str, limit: float) -> None:
    exponents = torch.arange(-133, 128).repeat_interleave(4)
    amax = torch.ldexp(torch.tensor([1.0, 1.5, 1.75, 1.9921875]).repeat(len(exponents) // 4), exponents).float()
    amax = amax[(amax > 0) & torch.isfinite(amax)].to(torch.bfloat16).float()
    encode, inverse = encode_scale(amax, QSpec(format=fmt, block=(1, 32), scale=scale))
    for a, e, d in zip(amax.tolist(), encode.tolist(), inverse.tolist(), strict=True):
        if scale == "fp32":
            with np.errstate(over="ignore"):
                quotient = float(np.float32(limit) / np.float32(a))
            assert e == min(quotient, torch.finfo(torch.bfloat16).max)
            continue
        assert e * d == 1.0
        assert a * e <= limit, "a power-of-two scale must never make its own amax saturate"
        # Largest such power of two, unless the exponent is at its end.
        assert a * e * 2 > limit or e == 2.0**127


def test_zero_infinite_and_nan_blocks() -> None:
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    x[1, 3], x[2, 5], x[3, :2] = float("inf"), float("nan"), torch.tensor([float("nan"), 3.0])
    made = quantize(x, QuantPlan(row=QSpec(format="e4m3", block=(1, 128), scale="pow2")))
    assert made.row is not None
    assert made.row.scale_inv[:3, 0].tolist() == [1.0, 1.0, 1.0]
    assert made.row.scale_inv[3, 0] == 2.0**-7, "448 / 3 rounded down to a power of two: NaN takes no part in amax"
    back = made.row.dequantize()
    assert back[1, 3] == 448 and back[2, 5].isnan() and back[3, 1] == 3.0
    assert int(made.nonfinite) == 3, "one infinity and two NaNs"


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 70),
    block=st.sampled_from([(1, 8), (8, 8), (1, 32), "row", "tensor"]),
    scale=st.sampled_from(["pow2", "fp32", "e8m0"]),
    axis=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_against_a_scalar_oracle(
    rows: int, cols: int, block: object, scale: str, axis: int, seed: int
) -> None:
    """Blocks cut out one by one, each element rounded by search in the table of all E4M3 values."""
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(rows, cols, generator=generator) * torch.exp2(8 * torch.randn(rows, 1, generator=generator))
    ).bfloat16()
    spec = QSpec(format="e4m3", block=block, scale=scale)
    made = quantize(x, QuantPlan(row=spec) if axis == 1 else QuantPlan(col=spec))
    ours = made.row if axis == 1 else made.col
    assert ours is not None
    operand = x if axis == 1 else x.T
    height, width = {"row": (1, operand.shape[1]), "tensor": tuple(operand.shape)}.get(block, block)  # type: ignore[call-overload]
    table = torch.tensor(
        sorted(
            {
                v
                for v in decode(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.float32).tolist()
                if v == v
            }
        )
    )
    for i in range(0, operand.shape[0], height):
        for j in range(0, operand.shape[1], width):
            piece = operand[i : i + height, j : j + width].float()
            encode, inverse = encode_scale(piece.abs().max().reshape(1), spec)
            stored = ours.scale_inv[i // height, j // width]
            assert stored == inverse[0]
            values = decode(ours.codes[i : i + height, j : j + width].contiguous(), torch.float32)
            distance = ((piece * encode).clamp(-448, 448)[..., None] - table).abs().min(-1).values
            assert torch.equal(distance, ((piece * encode).clamp(-448, 448) - values).abs())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 40),
    across=st.sampled_from([1, 8]),
    along=st.sampled_from([4, 16]),
    seed=st.integers(0, 2**31),
)
def test_shifted_codes_against_a_scalar_oracle(rows: int, cols: int, across: int, along: int, seed: int) -> None:
    """Block by block: the scale is the coarsest of rows that are not zero, each value the nearest with that scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp2(5 * torch.randn(rows, 1, generator=generator))
    x[torch.rand(rows, generator=generator) < 0.2] = 0
    row = quantize(x.bfloat16(), QuantPlan(row=QSpec(format="e4m3", block=(1, 8), scale="pow2"))).row
    assert row is not None
    made = shifted(row, QSpec(format="e4m3", block=(across, along), scale="pow2", origin="codes_shift"))
    assert made.codes.shape == (cols, rows) and made.axis == 0
    numbers = sorted({v for v in decode(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.float32)})
    grid, source, values = torch.stack(numbers), row.dequantize(), made.dequantize().T
    for i in range(0, rows, along):
        for j in range(0, cols, 8):
            piece, found = source[i : i + along, j : j + 8], values[i : i + along, j : j + 8]
            scales = row.scale[i : i + along, j // 8][piece.abs().amax(1) > 0]
            scale = scales.max() if len(scales) else torch.tensor(1.0)
            stored = made.scale_inv[j // 8, i // along] if across == 8 else made.scale_inv[j : j + 8, i // along]
            assert (stored == scale).all()
            nearest = ((piece.abs() / scale)[..., None] - grid).abs().min(-1).values * scale
            assert torch.equal((piece - found).abs(), nearest)


def test_how_often_shifted_codes_give_the_values_of_the_source() -> None:
    """The figures of docs/recipes.md: values of copies from the codes against copies from the bf16 tensor."""
    tile, square = (QSpec(format="e4m3", block=block, scale="pow2") for block in ((1, 128), (128, 128)))
    spec = square.model_copy(update={"origin": "codes_shift"})

    def equal(x: torch.Tensor) -> tuple[float, float]:
        made, blocks = quantize(x, QuantPlan(row=tile, col=tile)), quantize(x, QuantPlan(col=square)).col
        assert made.row is not None and made.col is not None and blocks is not None
        ours = shifted(made.row, spec)
        assert torch.equal(ours.scale_inv, blocks.scale_inv), "a block's amax is that of its largest row"
        return tuple(float((ours.dequantize() == q.dequantize()).float().mean()) for q in (made.col, blocks))  # type: ignore[return-value]

    gaussian = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert equal(gaussian) == (pytest.approx(0.9999, abs=1e-4), pytest.approx(0.99995, abs=5e-5))
    assert equal(source("outlier_rows")) == (pytest.approx(0.558, abs=5e-4), pytest.approx(0.8955, abs=5e-4))


def test_codes_with_other_scales_are_not_shifted() -> None:
    row = quantize(torch.randn(8, 128), QuantPlan(row=QSpec(format="e4m3", block=(1, 128), scale="fp32"))).row
    assert row is not None
    with pytest.raises(ValueError, match="cannot be made from e4m3 1x128 fp32"):
        shifted(row, QSpec(format="e4m3", block=(1, 128), scale="pow2", origin="codes_shift"))


def test_dequantised_pow2_operands_are_exact_in_bf16() -> None:
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(5)).bfloat16()
    made = quantize(x, QuantPlan(row=QSpec(format="e4m3", block=(1, 128), scale="pow2"))).row
    assert made is not None and made.exact_in_bf16
    assert torch.equal(made.dequantize(torch.bfloat16).float(), made.dequantize(torch.float32))


def test_square_blocks_transpose_exactly_and_tiles_refuse_to() -> None:
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(6)).bfloat16()
    square = QSpec(format="e4m3", block=(128, 128), scale="pow2")
    made = quantize(x, QuantPlan(row=square, col=square))
    again = quantize(x.T.contiguous(), QuantPlan(row=square)).row
    assert made.col is not None and again is not None
    assert torch.equal(made.col.codes, again.codes) and torch.equal(made.col.scale_inv, again.scale_inv)
    tile = quantize(x, QuantPlan(row=QSpec(format="e4m3", block=(1, 128), scale="pow2"))).row
    assert tile is not None
    with pytest.raises(ValueError, match="transposed"):
        tile.transpose()


def test_delayed_scaling_uses_the_maximum_of_earlier_steps() -> None:
    spec = QSpec(format="e4m3", block="tensor", scale="fp32", amax="delayed", history=3)
    state = new_state(spec)
    seen = []
    for amax in (2.0, 7.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0):
        made = quantize(torch.tensor([[amax, -amax / 2]]), QuantPlan(row=spec), state).row
        assert made is not None
        seen.append(round(float(1 / made.scale_inv), 3))
        advance_state(state, spec)
    # No history, then 448 / max of the last three; an operand that was zero for so long keeps its scale.
    assert seen == [1.0, 224.0, 64.0, 64.0, 64.0, *[448.0] * 5]


def test_static_scale_ignores_the_data() -> None:
    spec = QSpec(format="e4m3", block="tensor", scale="fp32", amax="static", static_amax=448.0)
    made = quantize(torch.tensor([[1000.0, 0.25, 1e-4]]), QuantPlan(row=spec)).row
    assert made is not None
    assert made.dequantize().tolist() == [[448.0, 0.25, 0.0]]
