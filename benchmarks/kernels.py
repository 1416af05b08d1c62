"""Times of the quantising kernels for a model's shapes on this GPU, beside its copy bandwidth.

    python benchmarks/kernels.py [--size 1.5b] [--tokens 16384] [--json FILE]

Medians of CUDA event times over inputs that rotate through more memory than the L2 cache holds. GB/s counts each byte
that must be read or written once. GEMMs and attention: `infir2 bench gemm`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from infir2_core.bench.ceilings import copy_rate, timed
from infir2_core.config.presets import load_preset
from infir2_core.ops.dispatch import quantize
from infir2_core.ops.hopper import elementwise
from infir2_core.ops.hopper import quantize as tiles
from infir2_core.precision.spec import QSpec, QuantPlan

TILE = QSpec(format="e4m3", block=(1, 128), scale="pow2")
SQUARE = QSpec(format="e4m3", block=(128, 128), scale="pow2")
BOTH, ROW = QuantPlan(row=TILE, col=TILE), QuantPlan(row=TILE)


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
    memory("norm + quantise", 4 * n, [lambda x=x: tiles.norm_quantize(x, rstd, w, BOTH, bad) for x in xs])
    memory("norm backward + residual", 8 * n, [
        lambda x=x, y=y, z=z: elementwise.norm_backward(x, y, rstd, w, z) for x, y, z in pairs
    ])  # fmt: skip
    n = tokens * ffn
    gate_up, grads = make(tokens, 2 * ffn), make(tokens, ffn)
    memory("swiglu + quantise row", 5 * n, [lambda x=x: tiles.swiglu_quantize(x, ROW, bad) for x in gate_up])
    memory("swiglu backward + quantise", 11 * n, [
        lambda g=g, x=x: tiles.swiglu_backward_quantize(g, x, BOTH, TILE, bad)
        for g, x in zip(grads, gate_up, strict=True)
    ])  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
