"""What this card reaches for a model's shapes: copy bandwidth, GEMM and attention rates, and the floor they set.

Operands are quantised the way training quantises them and drawn at random; a GEMM's rate at 700 W depends on its data,
so rates on zeros or on casts of plain numbers would promise too much, and so would rates of single calls with pauses
between them: under the load of a training step the card's clock falls. Medians of CUDA event times; inputs take turns,
so that they do not lie in the cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention import self_attention
from ..ops.dispatch import matmul, quantize
from ..precision.recipe import load_recipe
from ..precision.spec import QuantPlan
from .clocks import CALL_S, Load, Meter

if TYPE_CHECKING:
    from ..config.schema import ModelShape


AHEAD_CYCLES = 1_000_000  # about half a millisecond, longer than the host needs for any call here


@dataclass(frozen=True)
class Ceilings:
    """Rates of this card.

    Attributes:
        copy_gb_per_s: of a device copy, bytes read plus bytes written, 1e9.
        gemm_tflops: (role, gemm) -> {"bf16": ..., "fp8": ...}; the head has bf16 only.
        attention_tflops: `forward` and `backward`, causal FLOPs.
        floor_ms: `bf16` and `fp8` -> milliseconds of GEMMs, attention and head in one forward and backward.
        gemm_load: `bf16` and `fp8` -> clock and power while the GEMMs of the layers ran.
    """

    copy_gb_per_s: float
    gemm_tflops: dict[tuple[str, str], dict[str, float]]
    attention_tflops: dict[str, float]
    floor_ms: dict[str, float]
    gemm_load: dict[str, Load]


def timed(calls: list[Callable[[], object]], rounds: int = 15) -> float:
    """Median milliseconds of one call; the calls, each on inputs of its own, take turns.

    The device is kept busy while the host prepares the call, so that launching is not measured.
    """
    for call in calls:
        call()
    times = []
    for i in range(rounds):
        torch.cuda._sleep(AHEAD_CYCLES)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        calls[i % len(calls)]()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def sustained(calls: list[Callable[[], object]], meter: Meter | None = None, ms: float = 60.0) -> float:
    """Milliseconds of one call among many without a pause, which last about `ms` together; the median of three rounds.

    The calls, each on inputs of its own, take turns; what takes less time than queueing it, some 40 us, is
    measured at the host's pace. `meter` reads the card meanwhile, not while a kernel is compiled
    before.
    """

    def run(count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        for i in range(count):
            calls[i % len(calls)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    for call in calls:
        call()
    count = max(len(calls), round(ms / run(3)))
    with meter or nullcontext():
        return statistics.median(run(count) for _ in range(3))


def copy_rate() -> float:
    """GB/s (1e9) of a copy of 1 GiB on the device."""
    source = torch.zeros(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.ones_like(source)
    return 2 * (1 << 30) / timed([lambda: target.copy_(source)]) / 1e6


def linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Role -> (inputs, outputs) of a block's linears."""
    heads = shape.heads * shape.head_dim
    qkv = heads + 2 * shape.kv_heads * shape.head_dim
    return {
        "qkv": (shape.hidden, qkv),
        "o": (heads, shape.hidden),
        "gate_up": (shape.hidden, 2 * shape.ffn),
        "down": (shape.ffn, shape.hidden),
    }


def gemm_ms(tokens: int, inputs: int, outputs: int, fp8: bool, meter: Meter | None = None) -> dict[str, float]:
    """Milliseconds of fprop, dgrad and wgrad of one linear."""
    x, g, w = _random(tokens, inputs), _random(tokens, outputs), _random(outputs, inputs)
    if not fp8:
        calls: dict[str, Callable[[], object]] = {
            "fprop": lambda: F.linear(x, w),
            "dgrad": lambda: g @ w,
            "wgrad": lambda: torch.mm(g.T, x, out_dtype=torch.float32),
        }
    else:
        recipe = load_recipe("infir2")
        tile, square = (QuantPlan(row=recipe.spec(name), col=recipe.spec(name)) for name in ("tile", "square"))
        qx, qg, qw = quantize(x, tile), quantize(g, tile), quantize(w, square)
        assert qx.row and qx.col and qg.row and qg.col and qw.row and qw.col
        pairs = {"fprop": (qx.row, qw.row), "dgrad": (qg.row, qw.col), "wgrad": (qg.col, qx.col)}
        types = {"fprop": torch.bfloat16, "dgrad": torch.bfloat16, "wgrad": torch.float32}
        calls = {gemm: partial(matmul, gemm, *pairs[gemm], types[gemm]) for gemm in pairs}
    return {gemm: sustained([call], meter) for gemm, call in calls.items()}


def attention_ms(shape: ModelShape, seq_len: int, rows: int) -> dict[str, float]:
    """Milliseconds of one layer's attention, forward and backward."""
    count = shape.heads + 2 * shape.kv_heads
    heads = _random(rows * seq_len, count * shape.head_dim).view(-1, count, shape.head_dim).requires_grad_()
    call = partial(self_attention, heads, shape.heads, shape.kv_heads, (seq_len,) * rows)
    forward = sustained([call])
    out = call()
    grad = _random(rows * seq_len, shape.heads * shape.head_dim).view_as(out)
    backward = sustained([lambda: torch.autograd.grad(out, heads, grad, retain_graph=True)])
    return {"forward": forward, "backward": backward}


def measure(shape: ModelShape, seq_len: int, rows: int, note: Callable[[str], None] = lambda text: None) -> Ceilings:
    """Measures this card for a model and a microbatch of `rows` sequences."""
    tokens, floor = seq_len * rows, {"bf16": 0.0, "fp8": 0.0}
    rates: dict[tuple[str, str], dict[str, float]] = {}
    meters = {precision: Meter("cuda:0", CALL_S) for precision in floor}
    for role, (inputs, outputs) in linears(shape).items():
        note(f"GEMMs of {role}")
        for precision in floor:
            for gemm, ms in gemm_ms(tokens, inputs, outputs, precision == "fp8", meters[precision]).items():
                rates.setdefault((role, gemm), {})[precision] = 2 * tokens * inputs * outputs / ms / 1e9
                floor[precision] += shape.layers * ms
    note("GEMMs of the head")
    chunk = min(tokens, 8192)
    for gemm, ms in gemm_ms(chunk, shape.hidden, shape.vocab, False).items():
        rates["head", gemm] = {"bf16": 2 * chunk * shape.hidden * shape.vocab / ms / 1e9}
        floor = {precision: total + ms * tokens / chunk for precision, total in floor.items()}
    note("attention")
    found = attention_ms(shape, seq_len, rows)
    floor = {precision: total + shape.layers * sum(found.values()) for precision, total in floor.items()}
    work = 2 * tokens * seq_len * shape.heads * shape.head_dim  # scores and weighted sum, half of them masked
    attend = {"forward": work / found["forward"] / 1e9, "backward": 2.5 * work / found["backward"] / 1e9}
    loads = {precision: meter.load() for precision, meter in meters.items()}
    return Ceilings(copy_rate(), rates, attend, floor, loads)


def _random(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
