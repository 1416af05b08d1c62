"""What packing gains over padded batches: the same samples through the same engine, in turns.

    python benchmarks/packing.py --size 1.5b --recipe infir2
    python benchmarks/packing.py --size tiny --recipe bf16 --row-tokens 2048 --median 200 --samples 32 --device cpu

Lengths are log-normal (median and sigma of long reasoning unless given), cut at the row, drawn by a seed.
Packed, a step's samples go best-fit into flat microbatches of `--row-tokens`, as `infir2 sft` does. Padded, samples in
the order drawn make batches as large as fit the same budget, each filled up to its longest sample. Prints, as one JSON
object, the tokens of samples a second of both, the padding share of the padded batches, what that share promises as a
speed-up, and the speed-up that was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from infir2_core.config.presets import load_preset
from infir2_core.config.schema import RunConfig, Source
from infir2_core.data.batch import Batch, filled
from infir2_core.data.chat_set import ChatSample
from infir2_core.data.packing import pack, packed_batch
from infir2_core.engines.native import NativeEngine
from infir2_core.engines.ranks import Ranks
from infir2_core.precision.recipe import load_recipe
from infir2_core.train.chat_feed import size_of


def padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Samples in the order given, in batches whose count times longest is at most `budget`."""
    batches: list[list[int]] = [[]]
    for i, length in enumerate(lengths):
        batch = batches[-1]
        longest = max([length, *(lengths[j] for j in batch)])
        if batch and (len(batch) + 1) * longest > budget:
            batches.append([i])
        else:
            batch.append(i)
    return batches


def grown(sample: ChatSample, length: int) -> ChatSample:
    """The sample with tokens of weight 0 behind it."""
    more = length - len(sample.weights)
    tokens = torch.cat([sample.tokens, torch.zeros(more, dtype=torch.int64)])
    return ChatSample(tokens, torch.cat([sample.weights, torch.zeros(more)]))


def timed(engine: NativeEngine, batches: list[Batch]) -> float:
    """Seconds of one optimizer step."""
    cuda = engine.ranks.device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    engine.train_step(batches, 1e-6).result()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--recipe", default="infir2")
    parser.add_argument("--row-tokens", type=int, default=32768)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--median", type=float, default=4000)
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    preset = load_preset(args.size)
    random = np.random.Generator(np.random.Philox(args.seed))
    drawn = random.lognormal(np.log(args.median), args.sigma, args.samples)
    lengths = [int(n) for n in np.clip(drawn, 16, args.row_tokens)]
    samples = []
    for n in lengths:
        tokens = torch.from_numpy(random.integers(0, preset.model.vocab, n + 1))
        weights = torch.ones(n)
        weights[: n // 4] = 0.0
        samples.append(ChatSample(tokens, weights))
    config = RunConfig(
        name="packing",
        runs="-",
        size=args.size,
        model=preset.model.model_copy(update={"max_positions": max(args.row_tokens, preset.model.max_positions)}),
        source=Source(kind="scratch"),
        data=[],
        cpt=preset.cpt.model_copy(update={"recipe": args.recipe}),
    )
    engine = NativeEngine(config, load_recipe(args.recipe), Ranks(device=args.device))
    engine.model.initialise(0.008, 1)
    groups = padded(lengths, args.row_tokens)
    longest = [max(lengths[i] for i in group) for group in groups]
    flat = {
        "packed": [packed_batch([samples[i] for i in row]) for row in pack(lengths, args.row_tokens)],
        "padded": [
            packed_batch([grown(samples[i], most) for i in group]) for group, most in zip(groups, longest, strict=True)
        ],
    }
    arms = {
        name: [filled(batch, size_of(len(batch.tokens_T), args.row_tokens)) for batch in batches]
        for name, batches in flat.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(args.repeat + 1):
        for name, batches in arms.items():
            took = timed(engine, batches)
            if turn:  # the first compiles
                seconds[name].append(took)
    real = sum(lengths)
    slots = {name: sum(len(batch.tokens_T) for batch in batches) for name, batches in arms.items()}
    best = {name: statistics.median(times) for name, times in seconds.items()}
    found = {
        "size": args.size,
        "recipe": args.recipe,
        "samples": args.samples,
        "tokens": real,
        "microbatches": {name: len(batches) for name, batches in arms.items()},
        "padding_share": {name: round(1 - real / slots[name], 5) for name in arms},
        "tokens_per_second": {name: round(real / best[name], 1) for name in arms},
        "promised": round(slots["padded"] / slots["packed"], 3),
        "speed_up": round(best["padded"] / best["packed"], 3),
    }
    if args.device.startswith("cuda"):
        found |= {
            "device": torch.cuda.get_device_name(),
            "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
