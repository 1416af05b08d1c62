"""Schedules against megatron-core's scheduler, AdamW against a written-out float64 update."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from infir2_core.config.presets import load_preset
from infir2_core.config.schema import CptSettings
from infir2_core.optim.adamw import AdamW
from infir2_core.optim.schedule import decay_done, learning_rate


def settings(**changes: Any) -> CptSettings:
    base = load_preset("tiny").cpt.model_dump()
    return CptSettings(**(base | changes))


@pytest.mark.parametrize("schedule,style", [("wsd", "WSD"), ("cosine", "cosine"), ("constant", "constant")])
@pytest.mark.parametrize("warmup", [0, 7])
def test_schedule_equals_megatron_core(schedule: Any, style: str, warmup: int) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    s = settings(schedule=schedule, steps=60, warmup_steps=warmup, decay_steps=20, lr=1e-3, min_lr=1e-4)
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "max_lr": s.lr, "min_lr": s.min_lr}], lr=0.0
    )
    theirs = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=s.lr,
        min_lr=s.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=s.steps,
        lr_decay_style=style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=s.steps,
        wd_incr_style="constant",
        wsd_decay_steps=20,
        lr_wsd_decay_style="cosine",
    )
    for done in range(s.steps + 1):
        assert learning_rate(s, done) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18), done
        theirs.step(1)
    assert decay_done(s, s.steps) == (schedule != "constant") and not decay_done(s, s.steps - 1)


def test_adamw_update_clip_and_decay() -> None:
    torch.manual_seed(0)
    s = settings(lr=1e-2, weight_decay=0.1, clip=0.5)
    matrix, vector = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))
    ours = AdamW([("m", matrix), ("v", vector)], s)
    p64 = [matrix.detach().double(), vector.detach().double()]
    m64, v64 = [torch.zeros_like(p) for p in p64], [torch.zeros_like(p) for p in p64]
    for t in range(1, 6):
        grads = [torch.randn(5, 3), torch.randn(3)]
        matrix.grad, vector.grad = grads[0].clone(), grads[1].clone()
        norm, skipped = ours.step(s.lr)
        exact = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        assert float(norm) == pytest.approx(exact, rel=1e-6) and not skipped
        for i, (g, decay) in enumerate(zip(grads, (0.1, 0.0), strict=True)):
            g64 = g.double() / max(1.0, exact / s.clip)
            m64[i] = s.beta1 * m64[i] + (1 - s.beta1) * g64
            v64[i] = s.beta2 * v64[i] + (1 - s.beta2) * g64.square()
            update = (m64[i] / (1 - s.beta1**t)) / ((v64[i] / (1 - s.beta2**t)).sqrt() + s.eps)
            p64[i] = p64[i] * (1 - s.lr * decay) - s.lr * update
    for parameter, exact64 in zip((matrix, vector), p64, strict=True):
        assert torch.allclose(parameter.double(), exact64, rtol=1e-6, atol=1e-7)
    assert ours.updates == 5 and matrix.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_change_nothing(bad: float) -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    ours = AdamW([("p", parameter)], settings())
    parameter.grad = torch.ones(4, 4)
    ours.step(1e-2)
    before = parameter.detach().clone(), [m.clone() for m in ours.moments()["p"]], ours.updates
    parameter.grad = torch.ones(4, 4)
    parameter.grad[2, 1] = bad
    _, skipped = ours.step(1e-2)
    assert skipped == 1.0
    assert torch.equal(parameter, before[0]) and ours.updates == before[2] == 1
    assert all(torch.equal(a, b) for a, b in zip(ours.moments()["p"], before[1], strict=True))
