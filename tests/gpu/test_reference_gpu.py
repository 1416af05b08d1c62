"""The reference path on a CUDA device: the same codes and scales as on the CPU, GEMMs within the bound, a model that
trains.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from infir2_core.config.schema import ModelShape
from infir2_core.data.batch import Batch, rows_to_batch
from infir2_core.model.decoder import Decoder
from infir2_core.ops.reference.codes import decode
from infir2_core.ops.reference.matmul import matmul
from infir2_core.ops.reference.quantize import QuantPlan, quantize
from infir2_core.precision.recipe import load_recipe
from infir2_core.precision.spec import QSpec

pytestmark = pytest.mark.gpu
DATA = Path(__file__).parents[1] / "data"
SPECS = {
    f"{fmt}-{block}-{scale}": QSpec(format=fmt, block=block, scale=scale)
    for fmt in ("e4m3", "e5m2")
    for block, scale in (
        ((1, 128), "pow2"),
        ((128, 128), "pow2"),
        ((1, 128), "fp32"),
        ((1, 32), "e8m0"),
        ("row", "fp32"),
        ("tensor", "fp32"),
    )
}


@pytest.mark.parametrize("archive", ["te_blockwise", "te_edge"])
def test_golden_vectors(archive: str) -> None:
    data = np.load(DATA / f"{archive}.npz")
    for name in sorted({key.split("/")[0] for key in data.files if not key.startswith("te_linear")}):
        x = torch.from_numpy(data[f"{name}/x_bf16"].copy()).view(torch.bfloat16).cuda()
        for label, block in (("1x128", (1, 128)), ("128x128", (128, 128))):
            spec = QSpec(format="e4m3", block=block, scale="pow2")
            made = quantize(x, QuantPlan(row=spec, col=spec))
            for way, ours in (("rowwise", made.row), ("columnwise", made.col)):
                codes = torch.from_numpy(data[f"{name}/{label}/pow2/{way}_data"].copy())
                assert torch.equal(ours.codes.contiguous().view(torch.uint8).cpu(), codes), (name, label, way)
                scales = torch.from_numpy(data[f"{name}/{label}/pow2/{way}_scale_inv"].copy())
                mine = (ours.scale_inv.T if label == "1x128" else ours.scale_inv).cpu()
                assert torch.equal(mine, scales[: mine.shape[0], : mine.shape[1]]), (name, label, way)


@pytest.mark.parametrize("label", SPECS)
@pytest.mark.parametrize("shape", [(256, 384), (100, 300), (1, 7)])
def test_codes_and_scales_equal_the_cpu_bit_for_bit(label: str, shape: tuple[int, int]) -> None:
    spec = SPECS[label]
    generator = torch.Generator().manual_seed(shape[0])
    x = (torch.randn(shape, generator=generator) * torch.exp2(20 * torch.randn(shape, generator=generator))).bfloat16()
    x[0, 0] = float("nan")
    here, there = quantize(x, QuantPlan(row=spec, col=spec)), quantize(x.cuda(), QuantPlan(row=spec, col=spec))
    for a, b in ((here.row, there.row), (here.col, there.col)):
        assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8).cpu())
        assert torch.equal(a.scale, b.scale.cpu())
    assert int(here.nonfinite) == int(there.nonfinite)


def test_every_code_decodes_as_on_the_cpu() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        here, there = decode(codes.view(dtype), torch.float32), decode(codes.cuda().view(dtype), torch.float32).cpu()
        assert torch.equal(here.nan_to_num(7.0), there.nan_to_num(7.0)) and torch.equal(here.isnan(), there.isnan())


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("m,n,k", [(256, 512, 384), (100, 60, 300), (64, 64, 8960)])
def test_gemm_within_the_accumulation_bound(scale: str, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randn(r, k, generator=generator).bfloat16().cuda() for r in (m, n))
    qa = quantize(a, QuantPlan(row=QSpec(format="e4m3", block=(1, 128), scale=scale))).row
    qb = quantize(b, QuantPlan(row=QSpec(format="e4m3", block=(128, 128), scale=scale))).row
    exact = [q.dequantize(torch.float32).double() for q in (qa, qb)]
    truth, magnitude = exact[0] @ exact[1].T, exact[0].abs() @ exact[1].abs().T
    bound = 2 * (k + 3) * 2.0**-24 * magnitude
    assert ((matmul(qa, qb, torch.float32).double() - truth).abs() <= bound).all()
    assert ((matmul(qa, qb, torch.bfloat16).double() - truth).abs() <= bound + 2.0**-8 * truth.abs()).all()


SHAPE = ModelShape(
    layers=2, hidden=256, ffn=640, heads=4, kv_heads=2, head_dim=64, vocab=260, tied=True, max_positions=512
)


def gradients(recipe: str, batch: Batch, device: str) -> tuple[float, dict[str, torch.Tensor]]:
    model = Decoder(SHAPE, load_recipe(recipe), device)
    model.initialise(0.05, seed=3)
    loss = -model.logprobs(batch.to(device)).mean()
    loss.backward()
    return float(loss), {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "recipe", ["bf16", "infir2", "infir2-fp32-scales", "fp8-current", "fp8-delayed", "fp8-rowwise", "mxfp8"]
)
@pytest.mark.parametrize("lengths", [(256, 256), (100, 33, 7)])
def test_loss_and_gradients_agree_with_the_cpu(recipe: str, lengths: tuple[int, ...]) -> None:
    """A change of one bf16 ulp flips some codes by a whole E4M3 step, so two devices give two draws of the same
    rounding noise: they may differ by sqrt(2) of what the recipe itself differs from bf16. In bf16 there are no codes
    to flip."""
    generator = torch.Generator().manual_seed(1)
    batch = rows_to_batch([torch.randint(0, 260, (n + 1,), generator=generator) for n in lengths])
    here, there, plain = (gradients(r, batch, d) for r, d in ((recipe, "cpu"), (recipe, "cuda"), ("bf16", "cpu")))
    assert there[0] == pytest.approx(here[0], rel=2e-3)
    for name, grad in here[1].items():
        noise = torch.linalg.norm(plain[1][name] - grad)
        allowed = 0.03 * torch.linalg.norm(grad) if recipe == "bf16" else 1.5 * noise
        assert torch.linalg.norm(there[1][name] - grad) < allowed, name
