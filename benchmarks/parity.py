"""Parity study: several recipes and seeds of one size on one GPU, and what their held-out losses say.

    python benchmarks/parity.py run --data PREFIX --runs DIR --minutes 9     # again to go on where it stopped
    python benchmarks/parity.py swap --data PREFIX --runs DIR
    python benchmarks/parity.py report --runs DIR [--json FILE]

With `--warm N` each seed trains N steps in bf16 and all of its arms go on from that checkpoint: continual pre-training,
without the lottery of when a random model passes through its early transitions.

`run` starts every arm (recipe x seed) as a process of `infir2 cpt`, all at once, and asks them to stop with a
checkpoint when the time is over; the next call resumes them. Arms of one seed share their weights at step 0 and the
order of data, and one card; several cards take the seeds in turn. The control runs its first seed alone by default.

`swap` evaluates the last weights of each bf16 and infir2 run under the other recipe as well: it tells what rounding
costs while the loss is read from what it cost while the weights were learned.

`report` compares each recipe with bf16, seed by seed: the mean of the last evaluations' relative difference, its
standard error over seeds, and beside it how far bf16 runs of different seeds lie apart; the same for the training loss
of the last 5 % of steps, which all arms of a seed read from the same text; and how much sooner, in seconds of training,
a recipe's training loss comes down to where bf16 ends.

With `--spread` each arm has a card of its own as far as there are cards, and with `--discard` an arm ends when its last
step is logged, without writing its checkpoint: for models whose state takes longer to write than the study to run.
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
import tomllib
from pathlib import Path
from typing import Any

from infir2_core.train.metrics import read_metrics


def name_of(recipe: str, seed: int) -> str:
    """Run name of an arm."""
    return f"parity-{recipe}-s{seed}"


def arms(args: argparse.Namespace) -> list[tuple[str, int]]:
    """(recipe, seed) of every run of the study."""
    pairs = [(recipe, seed) for seed in args.seeds for recipe in ("bf16", *args.recipes)]
    return pairs + [(args.control, seed) for seed in args.control_seeds]


def start(
    args: argparse.Namespace, recipe: str, seed: int, name: str, card: int, *extra: str
) -> subprocess.Popen[bytes]:
    """One process of `infir2 cpt` that sees one of the cards seen here, and writes to a log file of its own."""
    command = [sys.executable, "-m", "infir2_cli", "cpt", "--size", args.size, "--data", args.data, "--recipe", recipe]
    command += ["--seed", str(seed), "--name", name, "--runs", args.runs, "--device", args.device, *args.extra, *extra]
    # Each arm launches kernels from one thread; more would only fight over the cores.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = visible.split(",")[card] if visible else str(card)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": chosen}
    logs = Path(args.runs) / "parity-logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{name}.log").open("ab") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out)


def run(args: argparse.Namespace) -> None:
    """Starts or resumes every arm and stops them in time."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    deadline = time.monotonic() + 60 * args.minutes
    if args.warm:
        extra = ("--from-scratch", "--steps", str(args.warm), "--decay-steps", "0", "--eval-every", str(args.warm))
        extra += ("--save-every", str(args.warm))
        starts = [  # another seed, so that the arms read text in an order of their own
            start(args, "bf16", 100 + seed, f"start-s{seed}", i % args.cards, *extra)
            for i, seed in enumerate(args.seeds)
        ]
        if any(process.wait() for process in starts):
            raise SystemExit("a start in bf16 failed: see parity-logs/start-*.log")
    for number, (recipe, seed) in enumerate(arms(args)):
        if args.discard and finished(Path(args.runs) / name_of(recipe, seed)):
            continue  # without a checkpoint it would begin again
        # The control takes the card that a study of three seeds on four cards leaves free.
        group = len(args.seeds) if recipe == args.control else args.seeds.index(seed)
        group = number if args.spread else group
        extra = ("--from", str(Path(args.runs) / f"start-s{seed}")) if args.warm else ("--from-scratch",)
        processes[name_of(recipe, seed)] = start(args, recipe, seed, name_of(recipe, seed), group % args.cards, *extra)
    while time.monotonic() < deadline and any(p.poll() is None for p in processes.values()):
        time.sleep(1)
        for name, process in processes.items():
            if args.discard and process.poll() is None and finished(Path(args.runs) / name):
                process.kill()
    for process in processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    for name, process in processes.items():
        print(name, "exit", process.wait(), flush=True)


def finished(folder: Path) -> bool:
    """Whether the last step of a run, and its evaluation, are logged."""
    try:
        settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["cpt"]
        lines = read_metrics(folder)
    except (OSError, KeyError):
        return False
    return bool(lines) and lines[-1]["step"] == settings["steps"] and lines[-1]["kind"] == "eval"


def swap(args: argparse.Namespace) -> None:
    """Starts one step from each final checkpoint under the other recipe: its evaluation at step 0 is the answer."""
    processes = []
    for i, seed in enumerate(args.seeds):
        for recipe in args.recipes:
            for weights, under in ((recipe, "bf16"), ("bf16", recipe)):
                source = str(Path(args.runs) / name_of(weights, seed))
                name = f"{name_of(weights, seed)}-under-{under}"
                extra = ("--from", source, "--steps", "1", "--warmup-steps", "0", "--decay-steps", "0")
                processes.append(start(args, under, seed, name, i % args.cards, *extra))
    for process in processes:
        process.wait()


def steps_of(args: argparse.Namespace, recipe: str, seed: int) -> tuple[list[float], list[float]]:
    """Training loss and milliseconds of each step of an arm."""
    lines = [line for line in read_metrics(Path(args.runs) / name_of(recipe, seed)) if line["kind"] == "step"]
    return [line["loss"] for line in lines], [line["step_ms"] for line in lines]


def first_as_low(losses: list[float], window: int, goal: float) -> int | None:
    """Steps after which the mean loss of the last `window` of them is first `goal` or less."""
    ends = range(window, len(losses) + 1)
    return next((end for end in ends if statistics.fmean(losses[end - window : end]) <= goal), None)


def compare_training(arms: dict[str, dict[int, tuple[list[float], list[float]]]]) -> dict[str, dict[str, Any]]:
    """Recipe -> per seed, against bf16: relative difference of the last 5 % of steps' mean loss, and matched loss.

    The latter is the number of steps after which the recipe's loss, averaged over as many steps, is first as low as
    bf16's at its end, over the number after which bf16's own is, which text that is easy to guess makes smaller than
    all; and what that is in time: bf16's over the recipe's. Times mean something only where no arms shared a card.
    """
    found: dict[str, dict[str, Any]] = {}
    for recipe, seeds in arms.items():
        told: dict[str, list[Any]] = {"last_5_percent": [], "steps_to_match": [], "speed_up_at_matched_loss": []}
        for seed, (losses, times) in seeds.items() if recipe != "bf16" else ():
            base, base_times = arms["bf16"][seed]
            window = max(1, len(base) // 20)
            goal = statistics.fmean(base[-window:])
            told["last_5_percent"].append(statistics.fmean(losses[-window:]) / goal - 1)
            there, own = (first_as_low(arm, window, goal) for arm in (losses, base))
            assert own is not None
            told["steps_to_match"].append(there and there / own)
            told["speed_up_at_matched_loss"].append(there and sum(base_times[:own]) / sum(times[:there]))
        if recipe != "bf16":
            found[recipe] = told
    return found


def percent(share: float | None) -> str:
    """A share as text; one seed has no spread."""
    return "unknown (one seed)" if share is None else f"{share:.3%}"


def report(args: argparse.Namespace) -> None:
    """Prints and optionally writes the comparison."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for recipe, seed in arms(args):
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
    spread = statistics.stdev(means.values()) / overall if len(means) > 1 else None
    rows: list[dict[str, Any]] = []
    for recipe, arm in last.items():
        if recipe == "bf16":
            continue
        paired = []
        for seed in arm:
            if steps[recipe][seed] != steps["bf16"][seed]:
                raise SystemExit(
                    f"{name_of(recipe, seed)} was evaluated at {steps[recipe][seed]}, bf16 at {steps['bf16'][seed]}"
                )
            differences = [a - b for a, b in zip(arm[seed], base[seed], strict=True)]
            paired.append(statistics.fmean(differences) / means[seed])
        error = statistics.stdev(paired) / math.sqrt(len(paired)) if len(paired) > 1 else None
        rows.append(
            {"recipe": recipe, "mean_relative": statistics.fmean(paired), "standard_error": error, "by_seed": paired}
        )
    training = compare_training({r: {s: steps_of(args, r, s) for s in seeds} for r, seeds in found.items()})
    swapped = {}
    for path in sorted(Path(args.runs).glob("parity-*-under-*")):
        first = next((line for line in read_metrics(path) if line["kind"] == "eval"), None)
        if first is not None:
            swapped[path.name] = first["loss"]
    data = {
        "size": args.size,
        "seeds": args.seeds,
        "evaluations": steps["bf16"][args.seeds[0]],
        "tokens": found["bf16"][args.seeds[0]][-1]["tokens"],
        "bf16_loss": means,
        "bf16_seed_spread": spread,
        "against_bf16": rows,
        "last_losses": last,
        "training": training,
        "swapped": swapped,
    }
    print(f"{args.size}, {len(args.seeds)} seeds, {data['tokens']:,} tokens, evaluations at {data['evaluations']}")
    print(f"bf16: held-out loss {overall:.4f} nats, seed-to-seed standard deviation {percent(spread)}")
    for row in rows:
        each = ", ".join(f"{value:+.3%}" for value in row["by_seed"])
        print(f"{row['recipe']}: {row['mean_relative']:+.3%} +- {percent(row['standard_error'])} ({each})")
    for name, told in training.items():
        each = ", ".join(f"{value:+.3%}" for value in told["last_5_percent"])
        sooner = ", ".join("never" if value is None else f"{value:.2f} x" for value in told["speed_up_at_matched_loss"])
        steps = ", ".join("never" if value is None else f"{value:.3f}" for value in told["steps_to_match"])
        print(f"{name}: training loss of the last 5 % of steps {each}")
        print(f"  as low as bf16 ends after {steps} of the steps that bf16 needs")
        print(f"  in time {sooner}")
    for name, loss in swapped.items():
        print(f"{name}: {loss:.4f}")
    if args.json:
        Path(args.json).write_text(json.dumps(data, indent=1), encoding="utf-8")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "swap", "report"])
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--size", default="small")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipes", nargs="+", default=["infir2"], help="compared with bf16")
    parser.add_argument("--control", default="fp8-static", help="a recipe that should fail")
    parser.add_argument("--control-seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--warm", type=int, default=0, help="bf16 steps that the arms of a seed share as their start")
    parser.add_argument("--cards", type=int, default=1, help="GPUs to spread the seeds over")
    parser.add_argument("--spread", action="store_true", help="a card for each arm")
    parser.add_argument("--discard", action="store_true", help="end arms without their last checkpoint")
    parser.add_argument("--data", default="data/corpus")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--last", type=int, default=5, help="evaluations that are averaged")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    # What stands behind `--` goes to `infir2 cpt` as it is.
    own, _, extra = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(own.split())
    args.extra = extra.split()
    {"run": run, "swap": swap, "report": report}[args.action](args)


if __name__ == "__main__":
    main()
