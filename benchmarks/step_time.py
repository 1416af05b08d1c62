"""Times optimizer steps of the native engine on this machine's GPU with random tokens: `python
benchmarks/step_time.py SIZE RECIPE ...`.

Prints one JSON line a recipe: median milliseconds of a step, tokens/s and peak GiB. Recipes are interleaved, round by
round, so that a card that warms up does not favour one of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from infir2_core.config.presets import load_preset
from infir2_core.config.schema import Blend, RunConfig, Source
from infir2_core.data.batch import rows_to_batch
from infir2_core.engines.native import NativeEngine
from infir2_core.engines.ranks import Ranks
from infir2_core.precision.recipe import load_recipe


def main() -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size")
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recompute", default="none")
    args = parser.parse_args()
    preset = load_preset(args.size)
    rows = [torch.randint(0, preset.model.vocab, (args.seq_len + 1,)) for _ in range(args.rows)]
    batch = rows_to_batch(rows)
    times: dict[str, list[float]] = {r: [] for r in args.recipes}
    peaks: dict[str, float] = {}
    engines: dict[str, NativeEngine] = {}
    for name in args.recipes:
        cpt = preset.cpt.model_copy(update={"recipe": name, "recompute": args.recompute})
        config = RunConfig(
            name="bench",
            runs="runs",
            size=args.size,
            model=preset.model,
            source=Source(kind="scratch"),
            data=[Blend(prefix="-")],
            cpt=cpt,
        )
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        engine = engines[name] = NativeEngine(config, load_recipe(name), Ranks(device="cuda:0"))
        engine.model.initialise(cpt.init_std, cpt.seed)
        for _ in range(2):
            engine.train_step([batch], 1e-4)
        peaks[name] = (torch.cuda.max_memory_allocated() - held) / 2**30
    for _ in range(args.rounds):
        for name, engine in engines.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.train_step([batch], 1e-4)
            torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - began))
    tokens = args.seq_len * args.rows
    for name in args.recipes:
        middle = statistics.median(times[name])
        row = {
            "size": args.size,
            "recipe": name,
            "tokens": tokens,
            "step_ms": round(middle, 1),
            "tok_per_s": round(tokens / middle * 1e3),
        }
        spread = [round(min(times[name]), 1), round(max(times[name]), 1)]
        print(
            json.dumps(row | {"spread_ms": spread, "peak_gib": round(peaks[name], 2), "torch": torch.__version__}),
            flush=True,
        )


if __name__ == "__main__":
    main()
