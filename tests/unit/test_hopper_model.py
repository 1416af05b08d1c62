"""The whole decoder on the kernels, run on the CPU, against the decoder by reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="some kernels are written in Triton")

from hopper_machine import HOPPER, on_this_machine, poisoned_buffers  # noqa: F401
from test_engine import engine

from infir2_core.config.schema import ModelShape
from infir2_core.data.batch import Batch, rows_to_batch
from infir2_core.model.decoder import Decoder
from infir2_core.ops import dispatch, update
from infir2_core.ops.reference.quantize import QTensor
from infir2_core.precision.recipe import load_recipe

pytestmark = pytest.mark.skipif(HOPPER, reason="tests/gpu runs the decoder on the GPU itself")
SHAPE = ModelShape(
    layers=2, hidden=128, ffn=256, heads=2, kv_heads=1, head_dim=64, vocab=256, tied=True, max_positions=256
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels wherever they fit, but the GEMMs, which need the GPU."""
    from infir2_core.ops.hopper import gemm

    monkeypatch.setattr(dispatch, "fast", lambda x: True)
    monkeypatch.setattr(gemm, "supports", lambda a, b: False)
    yield


def run(recipe: str, recompute: str = "none") -> tuple[float, dict[str, torch.Tensor], float]:
    model = Decoder(SHAPE, load_recipe(recipe), "cpu", recompute)
    model.initialise(0.1, seed=5)
    generator = torch.Generator().manual_seed(7)
    batch = rows_to_batch([torch.randint(0, 256, (65,), generator=generator) for _ in range(2)])
    with torch.no_grad():
        evaluated = float(-model.logprobs(batch).mean())
    loss, _ = model.loss(batch, torch.full((128,), 1 / 128))
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, evaluated


@pytest.mark.parametrize(
    "recipe",
    ["bf16", "infir2", "infir2-fp32-scales", "infir2-lean", "infir2-wgrad2d", "infir2-codes-shift", "infir2-fp8-head"],
)
def test_the_decoder_on_kernels_is_the_decoder(recipe: str, request: pytest.FixtureRequest) -> None:
    reference = run(recipe)
    request.getfixturevalue("kernels")
    ours = run(recipe)
    assert ours[0] == pytest.approx(reference[0], rel=1e-4) and ours[2] == pytest.approx(ours[0], rel=1e-3)
    assert set(ours[1]) == set(reference[1])
    for name, grad in reference[1].items():
        # A bf16 ulp in the row statistic flips single codes; an error in a formula would show as a whole.
        assert torch.linalg.norm(ours[1][name] - grad) < 0.03 * torch.linalg.norm(grad), name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_on_kernels_changes_no_bit(recompute: str, kernels: None) -> None:
    plain, again = run("infir2"), run("infir2", recompute)
    assert plain[0] == again[0]
    for name, grad in plain[1].items():
        assert torch.equal(grad, again[1][name]), name


@pytest.fixture
def updates(kernels: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights are updated by the kernel too."""
    monkeypatch.setattr(update, "fast", lambda x: True)
    yield


def batch_of(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return rows_to_batch([torch.randint(0, 64, (65,), generator=generator) for _ in range(2)])


@pytest.mark.parametrize("recipe", ["infir2", "infir2-lean"])
def test_refilled_weights_are_those_quantised_anew(recipe: str, updates: None) -> None:
    made = engine(recipe, SHAPE)
    made.model.initialise(0.1, seed=5)
    for seed in range(2):
        made.train_step([batch_of(seed), batch_of(seed + 9)], 1e-2).result()
    assert len(made.optimizer.refilled) == 8
    for name, layer in made.model.linears():
        kept = layer.fprop_weight()
        layer.drop_codes()
        fresh = layer.fprop_weight()
        assert isinstance(kept, QTensor) and isinstance(fresh, QTensor) and kept is not fresh
        assert torch.equal(kept.data.view(torch.uint8), fresh.data.view(torch.uint8)), name
        assert torch.equal(kept.scale, fresh.scale), name


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("recipe", ["infir2", "infir2-lean"])
def test_a_weight_that_is_not_finite_skips_every_step(recipe: str, value: float, updates: None) -> None:
    """Its codes are finite: only the count shows it, and steps that are skipped must count it again."""
    made = engine(recipe, SHAPE.model_copy(update={"layers": 1}))
    made.model.initialise(0.1, seed=5)
    with torch.no_grad():
        made.model.layers[0].gate_up.weight[0, 0] = value
    assert [made.train_step([batch_of(7)], 1e-3).result().skipped for _ in range(3)] == [True] * 3
