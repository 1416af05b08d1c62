"""Times optimizer steps of the native engine with random tokens: `python benchmarks/step_time.py SIZE RECIPE ...`.

Prints one JSON line a recipe: median milliseconds of a step, spread, tokens/s, and on a GPU peak GiB. Recipes are
interleaved, round by round, so that a machine that warms up or is busy does not favour one of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from infir2_core.bench.profile import profile
from infir2_core.config.presets import load_preset
from infir2_core.config.schema import Blend, RunConfig, Source
from infir2_core.data.batch import rows_to_batch
from infir2_core.engines.native import NativeEngine
from infir2_core.engines.ranks import Ranks
from infir2_core.precision.recipe import load_recipe


def measure(
    size: str,
    recipes: list[str],
    device: str,
    seq_len: int,
    rows: int,
    rounds: int,
    recompute: str = "none",
    kernels: int = 0,
) -> list[dict[str, Any]]:
    """One row of figures a recipe, from `rounds` timed steps each after two that are not timed."""
    preset, cuda = load_preset(size), device.startswith("cuda")
    batch = rows_to_batch([torch.randint(0, preset.model.vocab, (seq_len + 1,)) for _ in range(rows)])
    engines: dict[str, NativeEngine] = {}
    peaks: dict[str, float | None] = {}
    for name in recipes:
        cpt = preset.cpt.model_copy(update={"recipe": name, "recompute": recompute})
        source, data = Source(kind="scratch"), [Blend(prefix="random")]
        config = RunConfig(name="-", runs="-", size=size, model=preset.model, source=source, data=data, cpt=cpt)
        held = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        engine = engines[name] = NativeEngine(config, load_recipe(name), Ranks(device=device))
        if cuda:  # drawing 1.5 B numbers on the CPU takes longer than the measurement
            for parameter in engine.model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=cpt.init_std)
        else:
            engine.model.initialise(cpt.init_std, cpt.seed)
        for _ in range(2):
            engine.train_step([batch], 1e-4)
        peaks[name] = round((torch.cuda.max_memory_allocated() - held) / 2**30, 2) if cuda else None
    times: dict[str, list[float]] = {r: [] for r in recipes}
    for _ in range(rounds):
        for name, engine in engines.items():
            began = time.perf_counter()
            engine.train_step([batch], 1e-4)  # ends with the loss on the host, so the device is done
            times[name].append(1e3 * (time.perf_counter() - began))
    for name, engine in engines.items() if kernels else ():
        where = profile(lambda engine=engine: engine.train_step([batch], 1e-4))  # type: ignore[misc]
        print(f"{name}: span {where.span:.1f} ms, gaps {where.gaps:.1f} ms")
        print("  " + ", ".join(f"{group} {ms:.1f}" for group, ms in where.groups.items()))
        for kernel, ms, count in where.kernels[:kernels]:
            print(f"  {ms:8.2f} ms {count:5} x {kernel[:100]}")
    made = []
    for name in recipes:
        middle = statistics.median(times[name])
        row = {"size": size, "recipe": name, "tokens": seq_len * rows, "step_ms": round(middle, 1)}
        row |= {"spread_ms": [round(min(times[name]), 1), round(max(times[name]), 1)], "peak_gib": peaks[name]}
        made.append(row | {"tok_per_s": round(seq_len * rows / middle * 1e3), "torch": torch.__version__})
    return made


def main() -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size")
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--kernels", type=int, default=0, help="also profile one step and list so many kernels")
    args = parser.parse_args()
    for row in measure(
        args.size, args.recipes, args.device, args.seq_len, args.rows, args.rounds, args.recompute, args.kernels
    ):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
