"""The native engine: accumulation, normalisation over the global batch, checkpoints of its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_model import WIDE, rows

from infir2_core.config.presets import load_preset
from infir2_core.config.schema import Blend, ModelShape, RunConfig, Source
from infir2_core.data.batch import rows_to_batch
from infir2_core.engines.native import NativeEngine
from infir2_core.engines.ranks import Ranks
from infir2_core.errors import InputError
from infir2_core.precision.recipe import load_recipe


def engine(recipe: str, shape: ModelShape = WIDE, **cpt: Any) -> NativeEngine:
    settings = load_preset("tiny").cpt.model_copy(update={"recipe": recipe, **cpt})
    source, data = Source(kind="scratch"), [Blend(prefix="-")]
    config = RunConfig(name="-", runs="-", size="tiny", model=shape, source=source, data=data, cpt=settings)
    made = NativeEngine(config, load_recipe(recipe), Ranks())
    made.model.initialise(0.05, seed=4)
    return made


def test_microbatches_of_uneven_length_add_up_to_the_whole_batch() -> None:
    samples = rows(WIDE, (40, 7, 22, 31), seed=1)
    # A large eps: Adam would blow the rounding noise of gradients that are zero in exact arithmetic up to whole steps.
    whole, parts = (engine("fp32", eps=1e-2) for _ in range(2))
    a = whole.train_step([rows_to_batch(samples)], 1e-3).result()
    b = parts.train_step([rows_to_batch(samples[:1]), rows_to_batch(samples[1:])], 1e-3).result()
    assert b.loss == pytest.approx(a.loss, rel=1e-6) and b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    for (name, p), q in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=2e-6), name


def test_weights_of_zero_take_no_part() -> None:
    samples = rows(WIDE, (20, 20), seed=2)
    both, first = rows_to_batch(samples), rows_to_batch(samples[:1])
    both.weights_T[20:] = 0.0
    a, b = engine("fp32").train_step([both], 1e-3).result(), engine("fp32").train_step([first], 1e-3).result()
    assert a.loss == pytest.approx(b.loss, rel=1e-6) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)


@pytest.mark.parametrize("recipe", ["infir2", "infir2-codes-shift", "infir2-fp8-head", "fp8-delayed"])
def test_a_loaded_engine_goes_on_with_the_same_bits(recipe: str) -> None:
    batches = [[rows_to_batch(rows(WIDE, (30, 30), seed=s))] for s in range(6)]
    straight, stopped = engine(recipe), engine(recipe)
    for batch in batches[:3]:
        straight.train_step(batch, 1e-3).result()
        stopped.train_step(batch, 1e-3).result()
    tensors = {name: tensor.clone() for name, tensor in stopped.tensors().items()}
    resumed = engine(recipe)
    resumed.load(tensors, stopped.state(), optimizer=True, where="test")
    for batch in batches[3:]:
        assert straight.train_step(batch, 1e-3).result() == resumed.train_step(batch, 1e-3).result()
    assert all(torch.equal(t, resumed.tensors()[n]) for n, t in straight.tensors().items())


def test_the_gemm_report_changes_nothing() -> None:
    batch = rows_to_batch(rows(WIDE, (30,), seed=3))
    with_report, without = engine("fp8-delayed"), engine("fp8-delayed")
    report = with_report.gemm_report(batch)
    assert {row["gemm"]: row["count"] for row in report} == {"fprop": 8, "dgrad": 8, "wgrad": 8, "head": 1}
    assert with_report.train_step([batch], 1e-3).result() == without.train_step([batch], 1e-3).result()
    assert all(torch.equal(t, without.tensors()[n]) for n, t in with_report.tensors().items())


def test_a_checkpoint_of_another_shape_is_refused() -> None:
    made = engine("bf16")
    tensors = {name: tensor.clone() for name, tensor in made.tensors().items()}
    state = made.state()
    missing = {n: t for n, t in tensors.items() if n != "model/model.norm.weight"}
    with pytest.raises(InputError, match="no tensor 'model/model.norm.weight'"):
        made.load(missing, state, optimizer=False, where="test")
    tensors["model/model.norm.weight"] = torch.zeros(3)
    with pytest.raises(InputError, match=r"is \[3\], this model needs \[160\]"):
        made.load(tensors, state, optimizer=False, where="test")


@pytest.mark.parametrize("name", ["layers.1.down", "layers.1.o", "layers.1.qkv"])
def test_an_infinity_that_a_quantiser_would_hide_skips_the_step(name: str) -> None:
    """E4M3 stores an infinity as 448, which makes every gradient finite: the quantisers' count has to stop the step."""
    made = engine("infir2")

    def spike(kind: str, tensor: torch.Tensor, training: bool) -> torch.Tensor | None:
        if kind != "input gradient":
            return None
        spiked = tensor.clone()
        spiked.view(-1)[0] = float("inf")
        return spiked

    layer = made.model.get_submodule(name)
    layer.watches.append(spike)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    result = made.train_step([rows_to_batch(rows(WIDE, (30,), seed=3))], 1e-3).result()
    layer.watches.clear()
    assert result.skipped and result.nonfinite_values > 0
    assert all(torch.equal(p, before[n]) for n, p in made.model.named_parameters())
    assert not made.train_step([rows_to_batch(rows(WIDE, (30,), seed=3))], 1e-3).result().skipped
