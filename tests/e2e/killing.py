"""Kills a training run again and again, resumes it with the same command, and compares it with one that was never
killed.

A killed attempt is a forked child of this process: it starts with everything imported, so that a kill costs a second
and hundreds are affordable. SIGKILL comes either at a random moment or, through INFIR2_FAULT, at a chosen point of a
save.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from infir2_core.train.checkpoint import CheckpointStore

SAVE_POINTS = ("save:after-tensors", "save:before-rename", "save:after-rename")


@dataclass
class Tally:
    """What happened: kills by place, and attempts that ended by themselves before the kill came."""

    kills: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    lost: list[str] = field(default_factory=list)


def command(corpus: Path, runs: Path, name: str, steps: int, recipe: str) -> list[str]:
    text = f"""cpt --size tiny --seq-len 32 --global-batch 2 --micro-batch 1 --lr 1e-3 --steps {steps} --warmup-steps 4
    --decay-steps 8 --eval-every 10 --eval-iters 1 --save-every 3 --recipe {recipe} --device cpu --data {corpus}
    --runs {runs} --name {name}"""
    return text.split()


def attempt(arguments: list[str], fault: str = "") -> int:
    """Runs the command in a forked child to its end; returns the exit code, or -signal."""
    pid = start(arguments, fault)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def start(arguments: list[str], fault: str = "") -> int:
    """Starts the command in a forked child and returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.environ["INFIR2_FAULT"] = fault
        sys.argv = ["infir2", *arguments]
        from infir2_cli.main import main

        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        os._exit(code)


def steps_done(run: Path) -> int:
    """Last step in the metrics of a run that may be writing them right now."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines[-3:] if line.endswith("}")), default=0)
    except (OSError, ValueError):
        return 0


def kill_until_done(arguments: list[str], run: Path, steps: int, kills: int, seed: int) -> Tally:
    """Kills attempts until `kills` of them died, letting the run go on in between, then lets it finish.

    Saves happen every third step, so a run of `steps` steps meets many; when it gets near its end before enough kills
    happened it is made to lose its newest checkpoints and repeats those steps.
    """
    chance, tally = random.Random(seed), Tally()
    while sum(tally.kills.values()) < kills:
        point = chance.choice([*SAVE_POINTS, "anywhere", "anywhere"])
        if steps_done(run) > steps - 8:
            _rewind(run)
        if point in SAVE_POINTS:
            # The next save after some step: the fault fires at the first save that reaches it.
            ended = attempt(arguments, f"kill:{point}")
        else:
            ended = _kill_at_random(arguments, run, chance)
        if ended == -signal.SIGKILL:
            tally.kills[point] += 1
        else:
            tally.survived += 1
            if ended not in (0,):
                tally.lost.append(f"attempt ended with {ended} at {point}")
        newest, damaged = CheckpointStore(run / "checkpoints").newest()
        if damaged:
            tally.lost.append(f"damaged after {point}: {damaged}")
        if newest is None and steps_done(run) > 4:
            tally.lost.append(f"no checkpoint left after {point}")
    code = attempt(arguments)
    if code != 0:
        tally.lost.append(f"the last attempt ended with {code}")
    return tally


def _kill_at_random(arguments: list[str], run: Path, chance: random.Random) -> int:
    before, more = steps_done(run), chance.randint(1, 5)
    pid = start(arguments)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if steps_done(run) != before and steps_done(run) >= min(before, before - 2) + more:
            time.sleep(chance.random() * 0.05)
            break
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _rewind(run: Path) -> None:
    """Back to an early checkpoint: the newest ones are taken away, as if they had been lost."""
    store = run / "checkpoints"
    for path in sorted(store.glob("step-*"))[1:]:
        shutil.rmtree(path)
