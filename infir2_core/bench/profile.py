"""Where the GPU time of one step goes, by groups of kernels, and how long the GPU waited.

Groups are told from kernel names; a name that no rule knows counts as `other` and is listed, so that nothing hides.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

GROUPS = (
    ("attention", r"sdpa|flash|fmha|cudnn_generated|softmax_lse"),
    ("fp8 gemm", r"e4m3|e5m2|fp8|qgmma|nvjet_qq|nvjet.*qq"),
    ("head loss", r"_softmax_gradient"),
    ("quantise", r"^infir2_(tiles|stream|square|transpose)"),
    ("norm and rope", r"_add_rstd|_norm_backward|_column_sum|_rotate"),
    ("optimizer", r"infir2_(adamw|accumulate)|multi_tensor|FusedAdam|adam|foreach|lpnorm"),
    ("gemm", r"gemm|nvjet|cutlass|cublas|splitK"),
    ("copies and zeros", r"memcpy|memset|copy|fill|\bcat|CatArray"),
)


@dataclass(frozen=True)
class Profile:
    """GPU milliseconds of one call.

    Attributes:
        groups: group -> milliseconds, largest first.
        kernels: (name, milliseconds, launches), largest first.
        span: from the start of the first kernel to the end of the last.
        gaps: the part of `span` in which no kernel ran.
    """

    groups: dict[str, float]
    kernels: list[tuple[str, float, int]]
    span: float
    gaps: float


def group_of(name: str) -> str:
    """The group that a kernel's name belongs to."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")


def profile(call: Callable[[], object]) -> Profile:
    """Runs `call` once under torch's profiler; it should have run before, so that nothing compiles."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    return summarise([(e.name(), e.start_ns(), e.duration_ns()) for e in _device_events(recorded)])


def _device_events(recorded: Any) -> list[Any]:
    events = recorded.profiler.kineto_results.events()
    return [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA and e.duration_ns() > 0]


def summarise(events: list[tuple[str, int, int]]) -> Profile:
    """A profile from (name, start, duration) in nanoseconds of every kernel; kernels that overlap are not gaps."""
    totals: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    busy, reached = 0, None
    for name, start, duration in sorted(events, key=lambda e: e[1]):
        totals[group_of(name)] += duration / 1e6
        kernels[name][0] += duration / 1e6
        kernels[name][1] += 1
        begin = start if reached is None else max(start, reached)
        busy += max(0, start + duration - begin)
        reached = start + duration if reached is None else max(reached, start + duration)
    span = (reached - min(e[1] for e in events)) / 1e6 if reached is not None else 0.0
    rows = [(name, ms, int(count)) for name, (ms, count) in kernels.items()]
    ordered = dict(sorted(totals.items(), key=lambda item: -item[1]))
    return Profile(ordered, sorted(rows, key=lambda row: -row[1]), span, span - busy / 1e6)
