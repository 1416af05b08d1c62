"""Where the GPU time of one step goes, by groups of kernels, and how long the GPU waited.

Groups are told from kernel names, ours and those of TransformerEngine, Megatron-core (whose fused elementwise code is
compiled by Inductor) and cuDNN; a name that no rule knows counts as `other` and is listed, so that nothing hides.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# The order counts: names carry the types of their templates, FP8 ones too, so GEMMs come after what only casts.
GROUPS = (
    ("attention", r"sdpa|flash|fmha|cudnn_generated|softmax_lse|fused_attn::|to_bhsd"),
    ("head loss", r"_softmax_gradient|cross_entropy_\w+_kernel"),
    ("quantise", r"^infir2_(tiles|square|transpose|shift)"),
    ("quantise", r"transformer_engine::.*(cast|quantize|transpose|block_scal|amax|swizzle)|transpose_optimized_kernel"),
    ("norm and rope", r"_add_rstd|_norm_backward|_column_sum|_rotate|rmsnorm_|fused_(qkv_)?rope"),
    ("optimizer", r"infir2_(adamw|accumulate)|multi_tensor|FusedAdam|adam|foreach|lpnorm"),
    ("swiglu", r"triton_\w*(silu|sigmoid)|gated_act"),
    ("elementwise", r"triton_(poi|red|per)_"),
    ("fp8 gemm", r"^infir2_wgrad|e4m3|e5m2|fp8|qgmma|nvjet_qq|nvjet.*qq"),
    ("gemm", r"gemm|nvjet|cutlass|cublas|splitK"),
    ("copies and zeros", r"memcpy|memset|copy|fill|\bcat|CatArray"),
    ("elementwise", r"elementwise_kernel|reduce_kernel"),
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

    def told(self) -> dict[str, float]:
        """The groups, with `span` and `gaps`."""
        return self.groups | {"span": self.span, "gaps": self.gaps}


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
