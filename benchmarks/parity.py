"""Parity study: several recipes and seeds of one size on one GPU, and what their held-out losses say.

    python benchmarks/parity.py run --data PREFIX --runs DIR --minutes 9     # again to go on where it stopped
    python benchmarks/parity.py report --runs DIR [--json FILE]

`run` starts every arm (recipe x seed) as a process of `infir2 cpt`, all at once on the same card, and asks them to
stop with a checkpoint when the time is over; the next call resumes them. Arms of one seed share their weights at
step 0 and the order of data.

`report` compares each recipe with bf16, seed by seed: the mean of the last evaluations' relative difference, its
standard error over seeds, and beside it how far bf16 runs of different seeds lie apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from infir2_core.train.metrics import read_metrics


def name_of(recipe: str, seed: int) -> str:
    """Run name of an arm."""
    return f"parity-{recipe}-s{seed}"


def run(args: argparse.Namespace) -> None:
    """Starts or resumes every arm and stops them in time."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    logs = Path(args.runs) / "parity-logs"
    logs.mkdir(parents=True, exist_ok=True)
    # Each arm launches kernels from one thread; more would only fight over the cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for seed in args.seeds:
        for recipe in args.recipes:
            name = name_of(recipe, seed)
            command = [sys.executable, "-m", "infir2_cli", "cpt", "--size", args.size, "--data", args.data]
            command += [
                "--recipe",
                recipe,
                "--seed",
                str(seed),
                "--name",
                name,
                "--runs",
                args.runs,
                "--device",
                args.device,
                *args.extra,
            ]
            out = (logs / f"{name}.log").open("ab")
            processes[name] = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    deadline = time.monotonic() + 60 * args.minutes
    while time.monotonic() < deadline and any(p.poll() is None for p in processes.values()):
        time.sleep(1)
    for process in processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    for name, process in processes.items():
        print(name, "exit", process.wait(), flush=True)


def report(args: argparse.Namespace) -> None:
    """Prints and optionally writes the comparison."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for recipe in args.recipes:
        for seed in args.seeds:
            lines = read_metrics(Path(args.runs) / name_of(recipe, seed))
            found.setdefault(recipe, {})[seed] = [line for line in lines if line["kind"] == "eval"]
    last = {
        r: {s: [e["loss"] for e in evals[-args.last :]] for s, evals in seeds.items()} for r, seeds in found.items()
    }
    steps = {
        r: {s: [e["step"] for e in evals[-args.last :]] for s, evals in seeds.items()} for r, seeds in found.items()
    }
    base = last["bf16"]
    means = {s: statistics.fmean(v) for s, v in base.items()}
    overall = statistics.fmean(means.values())
    spread = statistics.stdev(means.values()) / overall if len(means) > 1 else math.nan
    rows: list[dict[str, Any]] = []
    for recipe in args.recipes:
        if recipe == "bf16":
            continue
        paired = []
        for seed in args.seeds:
            if steps[recipe][seed] != steps["bf16"][seed]:
                raise SystemExit(
                    f"{name_of(recipe, seed)} was evaluated at {steps[recipe][seed]}, bf16 at {steps['bf16'][seed]}"
                )
            differences = [a - b for a, b in zip(last[recipe][seed], base[seed], strict=True)]
            paired.append(statistics.fmean(differences) / means[seed])
        error = statistics.stdev(paired) / math.sqrt(len(paired)) if len(paired) > 1 else math.nan
        rows.append(
            {"recipe": recipe, "mean_relative": statistics.fmean(paired), "standard_error": error, "by_seed": paired}
        )
    data = {
        "size": args.size,
        "seeds": args.seeds,
        "evaluations": steps["bf16"][args.seeds[0]],
        "tokens": found["bf16"][args.seeds[0]][-1]["tokens"],
        "bf16_loss": means,
        "bf16_seed_spread": spread,
        "against_bf16": rows,
        "last_losses": last,
    }
    print(f"{args.size}, {len(args.seeds)} seeds, {data['tokens']:,} tokens, evaluations at {data['evaluations']}")
    print(f"bf16: held-out loss {overall:.4f} nats, seed-to-seed standard deviation {spread:.3%}")
    for row in rows:
        each = ", ".join(f"{value:+.3%}" for value in row["by_seed"])
        print(f"{row['recipe']}: {row['mean_relative']:+.3%} +- {row['standard_error']:.3%} ({each})")
    if args.json:
        Path(args.json).write_text(json.dumps(data, indent=1), encoding="utf-8")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--size", default="small")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipes", nargs="+", default=["bf16", "infir2", "fp8-static"])
    parser.add_argument("--data", default="data/corpus")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--last", type=int, default=5, help="evaluations that are averaged")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    # What stands behind `--` goes to `infir2 cpt` as it is.
    own, _, extra = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(own.split())
    args.extra = extra.split()
    {"run": run, "report": report}[args.action](args)


if __name__ == "__main__":
    main()
