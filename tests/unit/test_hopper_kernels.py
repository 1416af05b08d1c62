"""The quantising kernels and the optimizer's against the reference, on a GPU where there is one, else on the CPU."""

from __future__ import annotations

from typing import Any

import fresh
import pytest
import torch
from hopper_machine import DEVICE, HOPPER, normal, on_this_machine, poisoned_buffers  # noqa: F401

from infir2_core.ops import dispatch, fused
from infir2_core.ops.hopper import copies, elementwise, shift, weights
from infir2_core.ops.hopper import quantize as hopper
from infir2_core.ops.reference import adam
from infir2_core.ops.reference import elementwise as plainly
from infir2_core.ops.reference.moments import split
from infir2_core.ops.reference.quantize import QTensor, quantize, shifted
from infir2_core.ops.reference.stochastic import key, round_bf16
from infir2_core.precision.recipe import load_recipe
from infir2_core.precision.spec import QSpec, QuantPlan, Transform

SPECS = {
    f"{fmt} {block[0]}x{block[1]} {scale}": QSpec(format=fmt, block=block, scale=scale)
    for fmt in ("e4m3", "e5m2")
    for block in ((1, 128), (128, 128))
    for scale in ("pow2", "fp32")
}
TILE = QSpec(format="e4m3", block=(1, 128), scale="pow2")


def wild(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """bf16 values over the whole range of exponents, with a NaN, an infinity, a zero block and subnormals."""
    generator = fresh.generator(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp2(20 * torch.randn(rows, cols, generator=generator))
    x[0, 0], x[rows // 2, 7] = float("nan"), float("-inf")
    x[-128:, -128:] = 0
    x[3, :128] = 1e-40
    return x.bfloat16()


def counter() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=DEVICE)


def close(made: torch.Tensor, reference: torch.Tensor, ulps: float = 1.0) -> None:
    """Within one bf16 ulp, and different at all in at most 1e-4 of the elements (docs/design.md, Numbers)."""
    a, b = made.cpu().float(), reference.cpu().float()
    ulp = torch.exp2(torch.floor(torch.log2(b.abs().clamp(min=2.0**-126))) - 7)
    assert ((a - b).abs() <= ulps * ulp).all()
    assert (a != b).float().mean() <= 1e-4


def same(made: QTensor | None, reference: QTensor | None) -> None:
    """Equal codes and scales, bit for bit."""
    assert (made is None) == (reference is None)
    if made is not None and reference is not None:
        codes = [q.codes.cpu().contiguous().view(torch.uint8) for q in (made, reference)]
        assert torch.equal(*codes)
        assert torch.equal(made.scale_inv.cpu().contiguous(), reference.scale_inv.cpu().contiguous())


@pytest.mark.parametrize("label", SPECS)
@pytest.mark.parametrize("copies", ["row", "col", "both"])
def test_quantise_equals_the_reference_bit_for_bit(label: str, copies: str) -> None:
    spec = SPECS[label]
    plan = QuantPlan(row=spec if copies != "col" else None, col=spec if copies != "row" else None)
    shape = (384, 640) if HOPPER else (128, 256)
    x, bad = wild(*shape), counter()
    assert hopper.supports(x, plan)
    made, reference = hopper.quantize(x.to(DEVICE), plan, bad), quantize(x, plan)
    same(made.row, reference.row)
    same(made.col, reference.col)
    assert int(bad) == int(reference.nonfinite) == 2


def test_what_the_kernel_does_not_take() -> None:
    plan = QuantPlan(row=TILE)
    assert not hopper.supports(torch.zeros(100, 128, dtype=torch.bfloat16), plan)
    assert not hopper.supports(torch.zeros(128, 128), plan)
    row = QSpec(format="e4m3", block="row", scale="fp32")
    delayed = QSpec(format="e4m3", block=(1, 128), amax="delayed", history=4)
    mixed = QuantPlan(row=TILE, col=QSpec(format="e5m2", block=(1, 128), scale="pow2"))
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    for other in (QuantPlan(row=row), QuantPlan(row=delayed), mixed, QuantPlan()):
        assert not hopper.supports(x, other)


def test_square_scales_are_padded_for_the_gemm_without_nan() -> None:
    spec = SPECS["e4m3 128x128 pow2"]
    made = hopper.quantize(normal(128, 640, 0), QuantPlan(row=spec, col=spec), counter())
    assert made.row is not None and made.row.scale.stride() == (8, 1)
    assert torch.isfinite(made.row.scale.as_strided((1, 8), (8, 1))).all()


@pytest.mark.parametrize("kind", ["e4m3 {} pow2", "e4m3 {} fp32", "e5m2 {} pow2"])
@pytest.mark.parametrize("row", [True, False])
def test_rows_in_tiles_and_columns_in_squares(kind: str, row: bool) -> None:
    """One pass, two block shapes, as wgrad in 128x128 blocks wants it."""
    tile, square = SPECS[kind.format("1x128")], SPECS[kind.format("128x128")]
    plan = QuantPlan(row=tile if row else None, col=square)
    x, bad = wild(384, 256, seed=3), counter()
    x[130, 128:] = float("nan")  # a block with NaN and an infinity, one with NaN alone in a row
    assert hopper.supports(x, plan)
    made, reference = hopper.quantize(x.to(DEVICE), plan, bad), quantize(x, plan)
    same(made.row, reference.row)
    same(made.col, reference.col)
    assert int(bad) == int(reference.nonfinite)
    assert made.col is not None and made.col.scale.stride() == (4, 1), "three blocks of tokens, padded to four"
    assert not hopper.supports(x, QuantPlan(row=square, col=tile))


@pytest.mark.parametrize("kept", [True, False])
def test_swiglu_backward_with_columns_in_squares(kept: bool) -> None:
    gate_up, grad = normal(256, 2 * 256, 8, 2.0), normal(256, 256, 9)
    source: Any = hopper.swiglu_quantize(gate_up, QuantPlan(), counter(), torch.empty_like(grad), TILE, counter())[1]
    source = source if kept else gate_up
    debug, plan = torch.empty_like(gate_up), QuantPlan(row=TILE, col=SQUARE)
    made, product = hopper.swiglu_backward_quantize(grad, source, plan, TILE, counter(), debug)
    reference, both = quantize(debug, plan), QuantPlan(row=TILE, col=TILE)
    same(made.row, reference.row)
    same(made.col, reference.col)
    tiles, same_product = hopper.swiglu_backward_quantize(grad, source, both, TILE, counter())
    same(made.row, tiles.row)
    same(product, same_product)


@pytest.mark.parametrize("width", [256, 640])
@pytest.mark.parametrize("add", [True, False])
def test_norm_and_quantise(width: int, add: bool) -> None:
    rows = 256
    x, delta, weight = normal(rows, width, 1), normal(rows, width, 2), 1 + normal(1, width, 3)[0].float()
    total, rstd = elementwise.add_rstd(x, delta if add else None, 1e-6)
    assert torch.equal(total, x + delta if add else x)
    torch.testing.assert_close(rstd, torch.rsqrt(total.float().square().mean(-1) + 1e-6), rtol=1e-6, atol=0)
    debug, plan = torch.empty_like(x), QuantPlan(row=TILE, col=TILE)
    made = hopper.norm_quantize(total, rstd, weight, plan, counter(), debug)
    close(debug, plainly.norm(total, rstd, weight))
    reference = quantize(debug, plan)
    same(made.row, reference.row)
    same(made.col, reference.col)


@pytest.mark.parametrize("threads", [256, 512])
def test_every_tuning_of_the_kernels_gives_the_same_copies(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also of rows with NaN and infinities, and as many of these are counted."""
    x, weight = wild(384, 256, 17), 1 + normal(1, 256, 3)[0].float()
    x[200, 100:120], x[201] = float("nan"), float("inf")
    x, rstd = x.to(DEVICE), torch.rand(384, generator=fresh.generator(18)).to(DEVICE)
    debug = torch.empty_like(x)

    def every() -> list[Any]:
        made: list[Any] = []
        for row, col in ((TILE, TILE), (TILE, SQUARE), (SPECS["e5m2 1x128 fp32"],) * 2, (TILE, None), (None, TILE)):
            plan, bad, also = QuantPlan(row=row, col=col), counter(), counter()
            made.append((hopper.quantize(x, plan, bad), bad))
            plain = debug if col is TILE else None
            made.append((hopper.norm_quantize(x, rstd, weight, plan, also, plain), also))
        return made

    monkeypatch.setattr(hopper, "TUNING", hopper.TUNING | {hopper.LOADED: (2, 256, 1), hopper.NORMED: (2, 256, 1)})
    expected, normed = every(), debug.clone()
    tuning = (128 * 16 // threads, threads, 1)
    monkeypatch.setattr(hopper, "TUNING", hopper.TUNING | dict.fromkeys((hopper.LOADED, hopper.NORMED), tuning))
    debug.zero_()
    for (a, bad), (b, counted) in zip(every(), expected, strict=True):
        same(a.row, b.row)
        same(a.col, b.col)
        assert int(bad) == int(counted) > 250
    assert torch.equal(debug.view(torch.int16), normed.view(torch.int16))


@pytest.mark.parametrize("label", ["e4m3 1x128 pow2", "e4m3 1x128 fp32"])
def test_swiglu_and_quantise(label: str) -> None:
    gate_up, debug = normal(256, 2 * 384, 7, 2.0), torch.empty(256, 384, dtype=torch.bfloat16, device=DEVICE)
    plan = QuantPlan(row=SPECS[label], col=SPECS[label])
    made, _ = hopper.swiglu_quantize(gate_up, plan, counter(), debug)
    close(debug, plainly.swiglu_product(gate_up))
    reference = quantize(debug, plan)
    same(made.row, reference.row)
    same(made.col, reference.col)


@pytest.mark.parametrize("product", [True, False])
def test_swiglu_backward_and_quantise(product: bool) -> None:
    gate_up, grad = normal(256, 2 * 256, 8, 2.0), normal(256, 256, 9)
    debug, plan = torch.empty_like(gate_up), QuantPlan(row=TILE, col=TILE)
    spec, plain = TILE if product else None, torch.empty_like(grad)
    made, rebuilt = hopper.swiglu_backward_quantize(grad, gate_up, plan, spec, counter(), debug, plain)
    a, b = debug.cpu().float(), plainly.swiglu_backward(grad, gate_up).cpu().float()
    assert (a != b).float().mean() <= 1e-3  # (1 - sigmoid) cancels, so more values stand near a rounding border
    torch.testing.assert_close(a, b, rtol=2.0**-7, atol=1e-6)
    reference = quantize(debug, plan)
    same(made.row, reference.row)
    same(made.col, reference.col)
    assert (rebuilt is not None) == product
    if rebuilt is not None:
        forward = torch.empty(256, 256, dtype=torch.bfloat16, device=DEVICE)
        same(rebuilt, hopper.swiglu_quantize(gate_up, QuantPlan(col=TILE), counter(), forward)[0].col)
        assert torch.equal(plain, forward)


@pytest.mark.parametrize("label", ["e4m3 1x128 pow2", "e4m3 1x128 fp32", "e5m2 1x128 pow2"])
def test_gate_and_up_kept_as_codes(label: str) -> None:
    """Made on the way of the forward; the backward computes with their values, rounded to bf16."""
    spec, gate_up, grad = SPECS[label], normal(128, 2 * 256, 32, 2.0), normal(128, 256, 33)
    gate_up[3, 300] = float("inf")
    bad = [counter(), counter()]
    made, kept = hopper.swiglu_quantize(gate_up, QuantPlan(row=spec), bad[0], None, spec, bad[1])
    reference = quantize(gate_up, QuantPlan(row=spec))
    same(kept, reference.row)
    same(made.row, hopper.swiglu_quantize(gate_up, QuantPlan(row=spec), counter())[0].row)
    assert [int(count) for count in bad] == [1, 1] and kept is not None
    values, plan = fused.dequantized(kept, torch.bfloat16), QuantPlan(row=spec, col=spec)
    debug, plain = torch.empty_like(gate_up), torch.empty_like(grad)
    back, product = hopper.swiglu_backward_quantize(grad, kept, plan, spec, counter(), debug, plain)
    from_values = torch.empty_like(gate_up)
    expected, rebuilt = hopper.swiglu_backward_quantize(grad, values, plan, spec, counter(), from_values)
    assert torch.equal(debug, from_values) and torch.equal(plain, hopper_product(values))
    for a, b in ((back.row, expected.row), (back.col, expected.col), (product, rebuilt)):
        same(a, b)


def hopper_product(gate_up: torch.Tensor) -> torch.Tensor:
    made = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    hopper.swiglu_quantize(gate_up, QuantPlan(), counter(), made)
    return made


def test_without_copies_only_the_bf16_tensor_is_made() -> None:
    """What a bf16 recipe asks for."""
    gate_up, grad, nothing = normal(128, 512, 12), normal(128, 256, 13), QuantPlan()
    product, again, back = torch.empty_like(grad), torch.empty_like(grad), torch.empty_like(gate_up)
    made, _ = hopper.swiglu_quantize(gate_up, nothing, counter(), product)
    assert made.row is None and made.col is None
    close(product, plainly.swiglu_product(gate_up))
    hopper.swiglu_backward_quantize(grad, gate_up, nothing, None, counter(), back, again)
    assert torch.equal(product, again) and torch.isfinite(back.float()).all()
    x, weight, normed = normal(128, 256, 14), torch.ones(256, device=DEVICE), torch.empty_like(grad)
    rstd = elementwise.add_rstd(x, None, 1e-6)[1]
    hopper.norm_quantize(x, rstd, weight, nothing, counter(), normed)
    close(normed, plainly.norm(x, rstd, weight))


@pytest.mark.parametrize("plan", [QuantPlan(row=TILE), QuantPlan(col=TILE), QuantPlan(row=TILE, col=TILE)])
def test_infinities_are_counted_once_by_every_kernel(plan: QuantPlan) -> None:
    gate_up, grad, x = normal(128, 256, 10), normal(128, 128, 11), normal(128, 128, 12)
    gate_up[5, 130] = float("inf")
    bad = counter()
    hopper.swiglu_quantize(gate_up, plan, bad)
    assert int(bad) == 1
    grad[7, 3], grad[9, 4] = float("nan"), float("inf")
    bad, back = counter(), torch.empty_like(gate_up)
    hopper.swiglu_backward_quantize(grad, gate_up, plan, TILE, bad, back)
    assert int(bad) == int((~torch.isfinite(back.float())).sum()) >= 4
    rstd, weight = elementwise.add_rstd(x, None, 1e-6)[1], torch.ones(128, device=DEVICE)
    x[100, 100] = float("-inf")
    bad = counter()
    hopper.norm_quantize(x, rstd, weight, plan, bad)
    assert int(bad) == 1


def test_the_product_alone_is_quantised_when_the_gradient_is_not() -> None:
    gate_up, grad, back = normal(128, 256, 20), normal(128, 128, 21), torch.empty(128, 256, dtype=torch.bfloat16)
    made, col = hopper.swiglu_backward_quantize(grad, gate_up, QuantPlan(), TILE, counter(), back.to(DEVICE))
    assert made.row is None and made.col is None
    same(col, quantize(plainly.swiglu_product(gate_up), QuantPlan(col=TILE)).col)


SQUARE = QSpec(format="e4m3", block=(128, 128), scale="pow2")
ROWWISE = QSpec(format="e4m3", block="row", scale="fp32")


@pytest.mark.parametrize("x", [None, TILE, SQUARE, ROWWISE])
@pytest.mark.parametrize("g", [None, TILE, SQUARE])
def test_any_mixture_of_specs_gives_what_the_reference_gives(
    x: QSpec | None, g: QSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fused` decides which of them the kernels may make; the numbers must not depend on it."""
    gate_up, grad, hidden = normal(128, 256, 22), normal(128, 128, 23), normal(128, 128, 24)
    weight = 1 + normal(1, 128, 25)[0].float()

    def every() -> list[fused.Made]:
        def wanted(row: QSpec | None, col: QSpec | None) -> fused.Wanted:
            return fused.Wanted(QuantPlan(row=row, col=col), row is None or col is None, None, counter())

        rstd = plainly.add_rstd(hidden, None, 1e-6)[1]
        made = [fused.norm(hidden, rstd, weight, wanted(x, g)), fused.norm(hidden, rstd, weight, wanted(g, g))]
        made += [fused.swiglu(gate_up, wanted(x, x))[0]]
        return [*made, *fused.swiglu_backward(grad, gate_up, wanted(g, g), wanted(None, x))]

    monkeypatch.setattr(dispatch, "fast", lambda tensor: True)
    ours = every()
    monkeypatch.setattr(dispatch, "fast", lambda tensor: False)
    for a, b in zip(ours, every(), strict=True):
        for mine, theirs in ((a.row, b.row), (a.col, b.col)):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                difference = (mine.dequantize().float() - theirs.dequantize().float()).abs()
                assert difference.max() <= 0.07 * theirs.dequantize().float().abs().max()  # single codes may flip
                assert (difference > 0).float().mean() <= 2e-3


def test_tile_is_the_block_of_the_recipe() -> None:
    specs = [load_recipe("infir2").spec(name) for name in ("tile", "square")]
    assert [spec.block for spec in specs if spec] == [(1, copies.TILE), (copies.TILE, copies.TILE)]


def test_column_copies_of_square_blocks_are_turned() -> None:
    plan = QuantPlan(row=SQUARE, col=SQUARE)
    made = hopper.quantize(normal(256, 640, 31), plan, counter())
    assert made.row is not None and made.col is not None
    turned = weights.transposed(made.row)
    same(turned, made.col)
    assert turned.scale.stride() == made.col.scale.stride()


@pytest.mark.parametrize("rows,cols", [(260, 512), (144, 1024), (256, 512)])
def test_a_matrix_that_ends_within_a_block_is_turned_by_the_reference(
    rows: int, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a multiple of 4 blocks a row, the reference's scales lie as the kernels lay theirs: a head of 260 rows."""
    monkeypatch.setattr(dispatch, "fast", lambda _: True)
    made = quantize(normal(rows, cols, 33), QuantPlan(row=SQUARE))
    assert made.row is not None
    turned, expected = dispatch.transposed(made.row), made.row.transpose()
    assert torch.equal(turned.codes.float(), expected.codes.float())
    assert torch.equal(turned.scale_inv, expected.scale_inv)
    assert torch.equal(turned.dequantize(), expected.dequantize())


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_shifted_codes_equal_the_reference_bit_for_bit(block: tuple[int, int], fmt: str) -> None:
    """Rows far apart in size, rows and a block of zeros, a NaN, codes that become subnormal or zero."""
    x = normal(384, 640, 34).float() * torch.exp2(6 * normal(384, 1, 35).float())
    x[5], x[200, 128:256], x[128:256, 256:384] = 0, 0, 0
    x[300, 500], x[301:310, :128] = float("nan"), 1e-38
    spec = QSpec(format=fmt, block=(1, 128), scale="pow2")
    row = hopper.quantize(x.bfloat16(), QuantPlan(row=spec), counter()).row
    wanted = QSpec(format=fmt, block=block, scale="pow2", origin="codes_shift")
    assert row is not None and shift.supports(row, wanted)
    made = shift.shifted(row, wanted)
    same(made, shifted(row, wanted))
    laid = copies.Copies.allocate((384, 640), None, wanted, made.data.device).col
    assert laid is not None and made.scale.stride() == laid.scale.stride()
    wide = hopper.quantize(x.bfloat16(), QuantPlan(row=QSpec(format=fmt, block=(1, 128), scale="fp32")), counter()).row
    assert wide is not None and not shift.supports(wide, wanted)


MEAN = QSpec(format="e4m3", block=(1, 128), scale="fp32", rounding="stochastic")
VARIANCE = MEAN.model_copy(update={"transforms": (Transform(kind="power", exponent=0.5, undo="on_read"),)})


def adam_slot(m: str | QSpec, v: str | QSpec, split_master: bool, device: str) -> adam.Slot:
    weight = normal(128, 256, 40).cpu().float() * (1 + 1e-3 * normal(128, 256, 41).cpu().float())
    weight[0, 0], weight[5, 128:] = 0, 1e-30
    weight, rest = split(weight) if split_master else (weight, None)
    weight = weight.to(device)
    moments = [adam.Moment.zeros(weight, form, salt) for form, salt in ((m, 7), (v, 8))]
    return adam.Slot(weight, None if rest is None else rest.to(device), *moments)


@pytest.mark.parametrize("split_master", [False, True], ids=["wide", "split"])
@pytest.mark.parametrize("m,v", [("fp32", "fp32"), ("bf16", "bf16"), (MEAN, VARIANCE), (MEAN, MEAN)])
def test_adamw_equals_the_reference_bit_for_bit(m: str | QSpec, v: str | QSpec, split_master: bool) -> None:
    """Masters, remainders, moments and the new weight's codes, over steps of which one is skipped."""
    ours, theirs = adam_slot(m, v, split_master, DEVICE), adam_slot(m, v, split_master, "cpu")
    prepared = hopper.quantize(ours.weight.bfloat16(), QuantPlan(row=SQUARE), counter()).row
    assert prepared is not None
    for t in range(1, 5):
        grad = normal(128, 256, 50 + t).cpu() * 1e-3
        grad[7, :128] = 0
        grad = grad if split_master else grad.float()
        scalars = [torch.tensor(x) for x in (1e-2 / (1 - 0.9**t), (1 - 0.95**t) ** -0.5, 0.7, float(t == 3))]
        for slot, device in ((ours, DEVICE), (theirs, "cpu")):
            size, unbias, factor, skipped = (x.float().to(device) for x in scalars)
            step = adam.Step(0.9, 0.95, 1e-8, 0.999, size, unbias, factor, skipped.bool(), torch.tensor(t).to(device))
            if slot is ours:
                packed = torch.stack([size, unbias, factor, skipped])
                weights.adam_(slot, grad.to(device), step, packed, prepared, counter())
            else:
                adam.adam_(slot, grad, step)
        pairs = [(ours.weight, theirs.weight), (ours.m.data, theirs.m.data), (ours.v.data, theirs.v.data)]
        pairs += [(a.scale, b.scale) for a, b in ((ours.m, theirs.m), (ours.v, theirs.v)) if b.scale is not None]
        pairs += [(ours.remainder, theirs.remainder)] if theirs.remainder is not None else []
        for a, b in pairs:
            assert a is not None and b is not None
            assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)), t
        same(prepared, quantize(theirs.weight.bfloat16(), QuantPlan(row=SQUARE)).row)


def test_adamw_leaves_the_weight_in_bf16_for_recipes_that_want_it() -> None:
    slot, copy = adam_slot("fp32", "fp32", False, DEVICE), torch.empty(128, 256, dtype=torch.bfloat16, device=DEVICE)
    one, zero = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    step = adam.Step(0.9, 0.95, 1e-8, 1.0, one, one, one, zero.bool(), one.long())
    weights.adam_(slot, normal(128, 256, 60).float(), step, torch.stack([one, one, one, zero]), copy, None)
    assert torch.equal(copy, slot.weight.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_gradients_are_rounded_as_the_reference_does(dtype: torch.dtype) -> None:
    total, addend = normal(24, 100, 61), normal(24, 100, 62).to(dtype) * 0.01
    addend[2, 3], addend[4, 5] = float("inf"), float("nan")
    word = key(9, 4, 0, 2)
    expected = round_bf16(total.cpu().float() + addend.cpu(), word)
    weights.accumulate_(total, addend, word)
    numbers = ~expected.isnan()  # a NaN's sign and payload differ between processors
    assert torch.equal(total.cpu().isnan(), expected.isnan())
    assert torch.equal(total.cpu()[numbers].view(torch.int16), expected[numbers].view(torch.int16))
