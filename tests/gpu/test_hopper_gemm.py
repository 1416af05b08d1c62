"""FP8 GEMMs and whole layers on a Hopper GPU, against float64 and against the reference path."""

from __future__ import annotations

import os

import fresh
import pytest
import torch
from scratch import scratch_config

from infir2_core.ops.dispatch import ledger, matmul, quantize
from infir2_core.ops.hopper import gemm
from infir2_core.precision.spec import QSpec, QuantPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


LIBRARIES = {gemm.CUBLASLT, gemm.DEEPGEMM, gemm.OWN}


def operand(rows: int, contraction: int, block: tuple[int, int], scale: str, seed: int):
    generator = fresh.generator(seed, "cuda")
    x = torch.randn(rows, contraction, generator=generator, device="cuda")
    x *= torch.exp2(2 * torch.randn(rows, contraction // 128, generator=generator, device="cuda")).repeat_interleave(
        128, 1
    )
    return quantize(x.bfloat16(), QuantPlan(row=QSpec(format="e4m3", block=block, scale=scale))).row


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("left,right", [((1, 128), (1, 128)), ((1, 128), (128, 128)), ((128, 128), (1, 128))])
@pytest.mark.parametrize(
    "m,n,k", [(256, 384, 512), (128, 256, 640), (512, 1536, 8960), (16, 128, 1536), (384, 256, 128)]
)
def test_gemm_is_the_sum_of_block_products(
    m: int, n: int, k: int, left: tuple[int, int], right: tuple[int, int], scale: str
) -> None:
    """K / 128 of 5 and 70 are not divisible by 4: the case that older stacks got wrong without saying so.

    Bound: inside a block Hopper's FP8 units add products aligned to the largest of 32, keeping at least 13 fraction
    bits, and 128 products take four such additions: 4 * 2**-13 of the sum of magnitudes. Adding the K / 128 scaled
    partial sums in float32 costs K / 128 * 2**-24 of it, rounding to bf16 2**-9 of the result.
    """
    if m % 128 and left == (128, 128):
        pytest.skip("a matrix in square blocks has whole blocks")
    a, b = operand(m, k, left, scale, k), operand(n, k, right, scale, n)
    if m % 128:
        a.data, a.scale = a.data[:m].contiguous(), a.scale[:m].T.contiguous().T
    exact = [q.dequantize(torch.float64) for q in (a, b)]
    truth, magnitude = exact[0] @ exact[1].T, exact[0].abs() @ exact[1].abs().T
    bound = (2.0**-11 + k / 128 * 2.0**-24) * magnitude
    ledger.start()
    for dtype, rounding in ((torch.float32, 0.0), (torch.bfloat16, 2.0**-8)):
        for by in gemm.choices(a, b, dtype):
            torch.full((m, n), torch.nan, dtype=dtype, device="cuda")  # what the next buffer of this size holds
            made = gemm.scaled_matmul(a, b, dtype, by=by)
            assert ((made.double() - truth).abs() <= bound + rounding * truth.abs()).all(), by
            assert made.dtype == dtype
        matmul("fprop", a, b, dtype)
    assert {by for _, _, by in ledger.stop()} <= LIBRARIES
    print(f"largest share of the bound {float(((made.double() - truth).abs() / bound).max()):.3f}")


@pytest.mark.parametrize(
    "recipe", ["infir2", "infir2-fp32-scales", "infir2-wgrad2d", "infir2-codes-shift", "infir2-fp8-head"]
)
@pytest.mark.parametrize("hidden", [256, 512])
def test_kernels_and_reference_train_alike(recipe: str, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same codes in the first layer, so losses agree to accumulation error; deeper, one flipped code moves others.

    A head of 260 x 512 ends within a block and has four blocks a row, so that its scales lie as kernels lay theirs.
    """
    from infir2_core.config.schema import ModelShape
    from infir2_core.data.batch import rows_to_batch
    from infir2_core.model.decoder import Decoder
    from infir2_core.precision.recipe import load_recipe

    shape = ModelShape(
        layers=2, hidden=hidden, ffn=640, heads=4, kv_heads=2, head_dim=64, vocab=260, tied=True, max_positions=512
    )
    generator = torch.Generator().manual_seed(1)
    batch = rows_to_batch([torch.randint(0, 260, (257,), generator=generator) for _ in range(2)]).to("cuda")

    def run(name: str, ops: str) -> tuple[float, dict[str, torch.Tensor], set[str]]:
        monkeypatch.setitem(os.environ, "INFIR2_OPS", ops)
        model = Decoder(shape, load_recipe(name), "cuda")
        model.initialise(0.05, seed=3)
        ledger.start()
        loss, _ = model.loss(batch, torch.full((512,), 1 / 512, device="cuda"))
        loss.backward()
        used = {by for gemm, _, by in ledger.stop() if gemm != "head"}
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, used

    ours, reference, plain = run(recipe, "auto"), run(recipe, "reference"), run("bf16", "auto")
    assert ours[2] <= LIBRARIES and reference[2] == {"reference"}
    assert ours[0] == pytest.approx(reference[0], rel=1e-3)
    for name, grad in reference[1].items():
        noise = torch.linalg.norm(plain[1][name] - grad)
        assert torch.linalg.norm(ours[1][name] - grad) < 1.5 * noise, name


def test_a_quantised_head_runs_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, the last one shorter; dgrad contracts over 5 blocks of vocabulary."""
    from infir2_core.model.decoder import operands_of
    from infir2_core.model.head import HeadWeight
    from infir2_core.ops import loss as module
    from infir2_core.precision.recipe import load_recipe

    recipe, made, (tokens, vocab, hidden) = load_recipe("infir2-fp8-head"), [], (640, 640, 384)
    generator = torch.Generator("cuda").manual_seed(1)
    source = torch.randn(tokens, hidden, generator=generator, device="cuda").bfloat16()
    master = 0.1 * torch.randn(vocab, hidden, generator=generator, device="cuda")
    targets = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    for ops in ("auto", "reference"):
        monkeypatch.setitem(os.environ, "INFIR2_OPS", ops)
        monkeypatch.setattr(module, "CHUNK_BYTES", 256 * vocab * (4 if ops == "auto" else 12))
        x, weight = source.clone().requires_grad_(), torch.nn.Parameter(master.clone())
        head = HeadWeight(operands_of(recipe, recipe.policy_for("head", "head")), torch.bfloat16)
        head.nonfinite_values = head.nonfinite_values.cuda()
        ledger.start()
        weights = torch.full((tokens,), 1 / tokens, device="cuda")
        loss, _ = module.linear_cross_entropy(x, weight, head.read(weight, True), targets, weights)
        loss.backward()
        counts = ledger.stop()
        assert sum(counts.values()) == 9 and ({by for _, _, by in counts} == {"reference"}) == (ops == "reference")
        assert x.grad is not None and weight.grad is not None
        made.append((loss.detach(), x.grad.float(), weight.grad))
    for ours, reference in zip(*made, strict=True):
        assert torch.linalg.norm(ours - reference) < 0.01 * torch.linalg.norm(reference)


@pytest.mark.parametrize("right,dtype", [((128, 128), torch.bfloat16), ((1, 128), torch.float32)])
def test_both_libraries_give_the_same_bits(right: tuple[int, int], dtype: torch.dtype) -> None:
    """Which of them runs is a matter of speed alone."""
    a, b = operand(512, 8960, (1, 128), "pow2", 1), operand(1536, 8960, right, "pow2", 2)
    if gemm.DEEPGEMM not in gemm.choices(a, b, dtype):
        pytest.skip("deep_gemm is not installed")
    one, other = (gemm.scaled_matmul(a, b, dtype, by=by) for by in (gemm.CUBLASLT, gemm.DEEPGEMM))
    assert torch.equal(one, other)


@pytest.mark.parametrize("right,dtype", [((128, 128), torch.bfloat16), ((1, 128), torch.float32)])
def test_a_product_is_added_to_what_is_there(right: tuple[int, int], dtype: torch.dtype) -> None:
    a, b = operand(256, 640, (1, 128), "pow2", 1), operand(384, 640, right, "pow2", 2)
    before = torch.randn(256, 384, device="cuda").to(dtype)
    for by in gemm.choices(a, b, dtype):
        total = before.clone()
        alone = gemm.scaled_matmul(a, b, dtype, by=by)
        assert gemm.scaled_matmul(a, b, dtype, by=by, total=total) is total
        expected = before.double() + alone.double()
        assert ((total.double() - expected).abs() <= 2.0 ** (-22 if dtype == torch.float32 else -8) * (
            before.double().abs() + alone.double().abs()
        )).all(), by  # fmt: skip


@pytest.mark.parametrize("recipe", ["bf16", "infir2", "infir2-lean"])
def test_a_step_never_waits_for_the_device(recipe: str) -> None:
    from infir2_core.data.batch import rows_to_batch
    from infir2_core.engines.native import NativeEngine
    from infir2_core.engines.ranks import Ranks
    from infir2_core.precision.recipe import load_recipe

    engine = NativeEngine(scratch_config("small"), load_recipe(recipe), Ranks(device="cuda:0"))
    engine.model.initialise(0.02, 1)
    batches = [rows_to_batch(list(torch.randint(0, 256, (2, 513)))) for _ in range(2)]
    for _ in range(2):  # compiles, and asks devices for what is kept afterwards
        engine.train_step(batches, 1e-4).result()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = engine.train_step(batches, 1e-4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.result().loss > 0
