"""Times of the Hopper kernels for a model's shapes on this GPU, beside its copy bandwidth and GEMM rates.

    python benchmarks/kernels.py [--size 1.5b] [--tokens 16384] [--json FILE]

Medians of CUDA event times over inputs that rotate through more memory than the L2 cache holds. GB/s counts each byte
that must be read or written once.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from infir2_core.config.presets import load_preset
from infir2_core.ops.dispatch import matmul, quantize
from infir2_core.ops.hopper import elementwise
from infir2_core.precision.spec import QSpec, QuantPlan

TILE = QSpec(format="e4m3", block=(1, 128), scale="pow2")
SQUARE = QSpec(format="e4m3", block=(128, 128), scale="pow2")
BOTH, ROW = QuantPlan(row=TILE, col=TILE), QuantPlan(row=TILE)


def timed(calls: list[Callable[[], object]], rounds: int = 20) -> float:
    """Median milliseconds of one call; the calls, each on inputs of its own, take turns."""
    for call in calls:
        call()
    times = []
    for i in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        calls[i % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_rate() -> float:
    """GB/s of a device copy, bytes read plus bytes written."""
    source = torch.zeros(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.ones_like(source)
    return 2 * (1 << 30) / timed([lambda: target.copy_(source)]) / 1e6


def gemm_rates(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> dict[str, tuple[float, float]]:
    """TFLOPS of fprop, dgrad and wgrad in FP8 and in bf16, for x [T, K], g [T, N], w [N, K]."""
    qx, qg, qw = quantize(x, BOTH), quantize(g, BOTH), quantize(w, QuantPlan(row=SQUARE, col=SQUARE))
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "fprop": (lambda: matmul("fprop", qx.row, qw.row, torch.bfloat16), lambda: F.linear(x, w)),
        "dgrad": (lambda: matmul("dgrad", qg.row, qw.col, torch.bfloat16), lambda: g @ w),
        "wgrad": (lambda: matmul("wgrad", qg.col, qx.col, torch.float32), lambda: g.T @ x),
    }
    work = 2 * x.shape[0] * x.shape[1] * g.shape[1] / 1e9
    return {gemm: (work / timed([fp8]), work / timed([bf16])) for gemm, (fp8, bf16) in cases.items()}


def main() -> None:
    """Prints one line per kernel and writes JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json")
    args = parser.parse_args()
    shape = load_preset(args.size).model
    tokens, hidden, ffn = args.tokens, shape.hidden, shape.ffn
    results: dict[str, dict[str, float]] = {}
    bad = torch.zeros((), dtype=torch.int64, device="cuda")

    def make(*size: int) -> list[torch.Tensor]:
        return [torch.randn(*size, device="cuda", dtype=torch.float32).bfloat16() for _ in range(3)]

    def memory(name: str, count: float, calls: list[Callable[[], object]]) -> None:
        ms = timed(calls)
        results[name] = {"ms": ms, "gb_per_s": count / ms / 1e6}
        print(f"{name:36} {ms:8.3f} ms {count / ms / 1e6:8.0f} GB/s {count / ms / 1e6 / copy:6.2f} of copy", flush=True)

    copy = copy_rate()
    results["copy"] = {"gb_per_s": copy}
    print(f"copy {copy:.0f} GB/s")
    for width in (hidden, ffn, 2 * ffn):
        xs = make(tokens, width)
        n = tokens * width
        memory(f"quantise both {width}", 4 * n, [lambda x=x: quantize(x, BOTH, None, bad) for x in xs])
        memory(f"quantise row {width}", 3 * n, [lambda x=x: quantize(x, ROW, None, bad) for x in xs])
    weight = make(2 * ffn, hidden)
    plan = QuantPlan(row=SQUARE, col=SQUARE)
    memory("quantise gate-up weight", 8 * ffn * hidden, [lambda x=x: quantize(x, plan, None, bad) for x in weight])
    n = tokens * hidden
    xs, ys, zs = make(tokens, hidden), make(tokens, hidden), make(tokens, hidden)
    w = torch.ones(hidden, device="cuda")
    rstd = elementwise.add_rstd(xs[0], None, 1e-6)[1]
    pairs = list(zip(xs, ys, zs, strict=True))
    memory("add + rstd", 6 * n, [lambda x=x, y=y: elementwise.add_rstd(x, y, 1e-6) for x, y, _ in pairs])
    memory("norm + quantise", 4 * n, [lambda x=x: elementwise.norm_quantize(x, rstd, w, BOTH, bad) for x in xs])
    memory("norm backward + residual", 8 * n, [
        lambda x=x, y=y, z=z: elementwise.norm_backward(x, y, rstd, w, z) for x, y, z in pairs
    ])  # fmt: skip
    n = tokens * ffn
    gate_up, grads = make(tokens, 2 * ffn), make(tokens, ffn)
    memory("swiglu + quantise row", 5 * n, [lambda x=x: elementwise.swiglu_quantize(x, ROW, bad) for x in gate_up])
    memory("swiglu backward + quantise", 11 * n, [
        lambda g=g, x=x: elementwise.swiglu_backward_quantize(g, x, BOTH, True, bad)
        for g, x in zip(grads, gate_up, strict=True)
    ])  # fmt: skip
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    heads = shape.heads * shape.head_dim
    del gate_up, grads, xs, ys, zs, pairs
    for role, k, n in (("qkv", hidden, qkv), ("o", heads, hidden), ("gate_up", hidden, 2 * ffn), ("down", ffn, hidden)):
        for gemm, rates in gemm_rates(make(tokens, k)[0], make(tokens, n)[0], make(n, k)[0]).items():
            results[f"{role} {gemm}"] = {"fp8_tflops": rates[0], "bf16_tflops": rates[1]}
            print(f"{role:8} {gemm}: fp8 {rates[0]:6.0f}, bf16 {rates[1]:6.0f} TFLOPS", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
