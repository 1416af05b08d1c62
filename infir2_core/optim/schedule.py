"""Learning rate as a pure function of the step, in Megatron-LM's convention.

The optimizer step numbered s (counting from 1) uses `learning_rate(settings, s - 1)`: the rate depends on the steps
already done, so the very first step of a warm-up has rate 0, as upstream's runs have. Equal to megatron-core's
OptimizerParamScheduler at every step (tests/unit/test_optim.py).
"""

from __future__ import annotations

import math

from ..config.schema import CptSettings, SftSettings


def learning_rate(settings: CptSettings | SftSettings, done: int) -> float:
    """Rate for the next step after `done` steps.

    - linear warm-up over `warmup_steps` from 0 to `lr`
    - `wsd`: `lr` until `decay_steps` before the end, then half a cosine down to `min_lr`
    - `cosine`: half a cosine from the end of the warm-up to the last step
    - `constant`: `lr`
    """
    s = settings
    if s.warmup_steps and done <= s.warmup_steps:
        return s.lr * done / s.warmup_steps
    if s.schedule == "constant":
        return s.lr
    start = s.steps - s.decay_steps if s.schedule == "wsd" else s.warmup_steps
    if done <= start:
        return s.lr
    if done >= s.steps:
        return s.min_lr
    progress = (done - start) / (s.steps - start)
    return s.min_lr + (s.lr - s.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def decay_done(settings: CptSettings | SftSettings, done: int) -> bool:
    """Whether no stable-phase checkpoint is needed any more: the run has decayed, to its end."""
    decays = settings.schedule == "cosine" or (settings.schedule == "wsd" and settings.decay_steps > 0)
    return decays and done >= settings.steps
