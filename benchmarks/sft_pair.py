"""Fine-tuning in FP8 against bf16: the same chats in the same order through `infir2 sft`, one arm after the other.

    python benchmarks/sft_pair.py chats OUT.jsonl FOLDER... --tokenizer HF_DIR [--tokens 3500000]
    python benchmarks/sft_pair.py run --runs DIR [--recipes infir2] -- --size 1.5b --from RUN --data OUT.jsonl ...
    python benchmarks/sft_pair.py report --runs DIR [--recipes infir2] [--json FILE]

`chats` writes conversations with long answers of very different lengths from Python sources: the first fifth of a file
is the user's, the rest is what the assistant goes on with; one file in four is told in two turns.

`run` gives what follows `--` to `infir2 sft`, for bf16 and for each recipe. An arm ends when its last step is logged,
without its checkpoint. `report` compares training losses step by step, held-out losses, peak memory, and tokens a
second, of the last third of the steps and of all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from infir2_core.data.tokenizer import load_tokenizer
from infir2_core.train.metrics import read_metrics


def conversation(text: str, turns: int) -> list[dict[str, str]]:
    """A file's text in `turns` turns, cut at line ends: a fifth of each part is asked, the rest answered."""
    lines = text.splitlines(keepends=True)
    parts = [lines[i * len(lines) // turns : (i + 1) * len(lines) // turns] for i in range(turns)]
    said = [("".join(part[: max(1, len(part) // 5)]), "".join(part[max(1, len(part) // 5) :])) for part in parts]
    pairs = [({"role": "user", "content": a}, {"role": "assistant", "content": b}) for a, b in said]
    return [message for pair in pairs for message in pair]


def chats(args: argparse.Namespace) -> None:
    """Writes samples until they have as many tokens as were asked for."""
    tokenizer, tokens, count = load_tokenizer(args.tokenizer), 0, 0
    paths = [path for folder in args.folders for path in sorted(Path(folder).rglob("*.py"))]
    random.Random(args.seed).shuffle(paths)
    with args.out.open("w", encoding="utf-8") as out:
        for path in paths:
            text = path.read_text(encoding="utf-8", errors="ignore")
            length = len(tokenizer.encode(text))
            if len(text.splitlines()) < 20 or length > args.longest:
                continue
            turns = 2 if count % 4 == 3 else 1
            messages = conversation(text, turns)
            if all(message["content"].strip() for message in messages):
                out.write(json.dumps({"id": count, "messages": messages}) + "\n")
                tokens, count = tokens + length, count + 1
            if tokens >= args.tokens:
                break
    print(f"{args.out}: {count} conversations, about {tokens:,} tokens")


def done(folder: Path, steps: int) -> bool:
    """Whether the run's last step, and its validation, are logged."""
    try:
        lines = read_metrics(folder)
    except OSError:
        return False
    return bool(lines) and lines[-1]["kind"] == "eval" and lines[-1]["step"] == steps


def run(args: argparse.Namespace, given: list[str]) -> None:
    """Starts the arms one after the other."""
    args.runs.mkdir(parents=True, exist_ok=True)
    if there := [path.name for path in args.runs.glob("sft-*")]:
        raise SystemExit(f"{args.runs} has {', '.join(sorted(there))} already: give another folder")
    for recipe in ("bf16", *args.recipes):
        command = [sys.executable, "-m", "infir2_cli", "sft", "--stage", "1", *given, "--runs", str(args.runs)]
        command += ["--recipe", recipe, "--name", f"sft-{recipe}", "--steps", str(args.steps)]
        command += ["--eval-every", str(args.eval_every)]
        with (args.runs / f"sft-{recipe}.log").open("wb") as out:
            child = subprocess.Popen(command, stdout=out, stderr=out)
            try:
                while child.poll() is None and not done(args.runs / f"sft-{recipe}", args.steps):
                    time.sleep(0.5)
            finally:
                child.kill()
                child.wait()
            if not done(args.runs / f"sft-{recipe}", args.steps):
                raise SystemExit((args.runs / f"sft-{recipe}.log").read_text()[-3000:])


def rate(steps: list[dict[str, Any]]) -> float:
    """Tokens a second over all of these steps."""
    return sum(step["tok_per_s"] * step["step_ms"] for step in steps) / sum(step["step_ms"] for step in steps)


def report(args: argparse.Namespace) -> None:
    """Prints and optionally writes the comparison."""
    arms: dict[str, list[dict[str, Any]]] = {}
    held: dict[str, list[float]] = {}
    for recipe in ("bf16", *args.recipes):
        lines = read_metrics(args.runs / f"sft-{recipe}")
        arms[recipe] = [line for line in lines if line["kind"] == "step"]
        held[recipe] = [line["loss"] for line in lines if line["kind"] == "eval"]
    base = arms["bf16"]
    found: dict[str, Any] = {}
    for recipe, steps in arms.items():
        apart = [a["loss"] / b["loss"] - 1 for a, b in zip(steps, base, strict=True)]
        late = 2 * len(steps) // 3  # by then every kernel has been compiled
        found[recipe] = {
            "steps": len(steps),
            "tokens": steps[-1]["tokens"],
            "first_ten": statistics.fmean(step["loss"] for step in steps[:10]),
            "last_ten": statistics.fmean(step["loss"] for step in steps[-10:]),
            "held_out": held[recipe],
            "held_out_relative": [a / b - 1 for a, b in zip(held[recipe], held["bf16"], strict=True)],
            "mean_relative": statistics.fmean(apart),
            "largest_relative": max(apart, key=abs),
            "tokens_per_second": rate(steps[late:]),
            "tokens_per_second_with_compilation": rate(steps),
            "memory_gb": max(step["memory_gb"] for step in steps),
            "padding_share": statistics.fmean(step["padding_share"] for step in steps),
            "losses": [step["loss"] for step in steps],
        }
    shown = {recipe: {k: v for k, v in facts.items() if k != "losses"} for recipe, facts in found.items()}
    print(json.dumps(shown, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Parses and dispatches."""
    own, given = sys.argv[1:], []
    if "--" in own:
        own, given = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writer = verbs.add_parser("chats")
    writer.add_argument("out", type=Path)
    writer.add_argument("folders", nargs="+")
    writer.add_argument("--tokenizer", required=True)
    writer.add_argument("--tokens", type=int, default=3_500_000)
    writer.add_argument("--longest", type=int, default=30_000)
    writer.add_argument("--seed", type=int, default=0)
    for verb in ("run", "report"):
        reader = verbs.add_parser(verb)
        reader.add_argument("--runs", type=Path, required=True)
        reader.add_argument("--recipes", nargs="+", default=["infir2"])
        reader.add_argument("--steps", type=int, default=120)
        reader.add_argument("--eval-every", type=int, default=40)
        reader.add_argument("--json", type=Path)
    args = parser.parse_args(own)
    if args.verb == "chats":
        chats(args)
    elif args.verb == "run":
        run(args, given)
    else:
        report(args)


if __name__ == "__main__":
    main()
