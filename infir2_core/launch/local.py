"""Runs a plan on this machine: the run folder, then one process a rank.

The folder is complete before anything trains: config.toml and recipe.json are all that a rank reads. Rank 0 is this
process; other ranks are children that start from the same folder.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config.runfile import differences, write_config
from ..config.schema import RunConfig
from ..errors import STOPPED, InputError, MachineError
from ..machine import find_gpus
from ..precision.recipe import Recipe, from_json
from ..runs import read_config, write_exit
from .plan import excess_bytes, make_plan, what_fits


@dataclass(frozen=True)
class RunFolder:
    """A run folder that is ready: `status` tells what a start would do."""

    path: Path
    config: RunConfig
    recipe: Recipe
    status: Literal["new", "resume"]


def open_run(config: RunConfig, recipe: Recipe, new: bool) -> RunFolder:
    """Creates the run folder, or finds that of the same settings.

    Args:
        config: resolved settings; its name is the folder's.
        recipe: stored beside them.
        new: never continue an earlier run: take the next free name.

    Raises:
        InputError: the folder holds a run made with other settings (each difference is named), something else, or may
            not be written.
        MachineError: not enough disk for the checkpoints that will be kept, or not enough GPU memory for a step.
    """
    runs = Path(config.runs)
    if new:
        name, number = config.name, 2
        while (runs / config.name).exists():
            config = config.model_copy(update={"name": f"{name}-{number}"})
            number += 1
    folder = runs / config.name
    if (folder / "config.toml").is_file():
        return _existing(folder, config, recipe)
    # A start that was killed leaves recipe.json alone: config.toml is written last.
    if folder.is_dir() and any(not path.name.startswith(("recipe.json", "config.toml")) for path in folder.iterdir()):
        raise InputError("the run folder holds something that is not a run", str(folder), "choose another --name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_disk(folder, config, recipe)
        _check_memory(config, recipe)
        (folder / "recipe.json").write_text(recipe.to_json(), encoding="utf-8")
        write_config(config, folder / "config.toml")
    except PermissionError as error:
        raise InputError("no permission to write here", str(folder), "choose another --runs folder") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(
            "there is a file where the run folder should be", str(folder), "choose another --runs"
        ) from error
    except OSError as error:
        raise MachineError(
            f"the run folder cannot be written: {error.strerror}", str(folder), "free some disk space"
        ) from error
    return RunFolder(folder, config, recipe, "new")


def _existing(folder: Path, config: RunConfig, recipe: Recipe) -> RunFolder:
    stored = read_config(folder)
    changed = differences(stored, config)
    # Checkpoints load on any device and number of ranks.
    here: dict[str, object] = {"device": config.device, "ranks": config.ranks}
    earlier = load_recipe_file(folder)
    if earlier.hash != recipe.hash:
        changed.append(f"recipe {recipe.name}: {earlier.hash} -> {recipe.hash}")
    if changed:
        hint = "repeat the settings of that run, choose another --name, or pass --new"
        raise InputError("this run was made with other settings: " + "; ".join(changed), str(folder), hint)
    here |= {
        "runs": config.runs,
        "data": config.data,
        "tokenizer": config.tokenizer,
    }  # the same corpora, perhaps in another place
    return RunFolder(folder, stored.model_copy(update=here), earlier, "resume")


def load_recipe_file(folder: Path) -> Recipe:
    """The recipe a run folder was made with."""
    path = folder / "recipe.json"
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError) as error:
        raise InputError("the run's recipe cannot be read", str(path), "start again with --new") from error


def _check_disk(folder: Path, config: RunConfig, recipe: Recipe) -> None:
    needed, free = make_plan(config, recipe).peak_disk_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise MachineError(
            f"checkpoints of this run need {needed / 2**30:.1f} GB, {free / 2**30:.1f} GB are free",
            str(folder),
            "free disk space, choose another --runs folder, or lower --keep-last or --keep-every",
        )


def _check_memory(config: RunConfig, recipe: Recipe) -> None:
    gpus = find_gpus() if config.device.startswith("cuda") else ()
    if not gpus:
        return  # on a CPU the host swaps or the kernel ends the process; models for it are small
    room = min(gpu.memory for gpu in gpus[: config.ranks])
    excess = excess_bytes(config, recipe, room)
    if excess > 0:
        raise MachineError(
            f"a step needs {(room + excess) / 2**30:.1f} GB of memory, {excess / 2**30:.1f} GB more than the GPU has",
            f"microbatches of {config.train.micro_tokens:,} tokens, --recipe {recipe.name}",
            "; ".join(what_fits(config, recipe, room)) or "no setting of this size fits; choose a smaller --size",
        )


class Workers:
    """Ranks 1 .. N-1 of a run as child processes of rank 0, on this machine.

    Args:
        folder: the run folder, complete.
        attempt: where their logs and exit records go.
        ranks: N.
        on_death: called from another thread when a worker failed and rank 0, waiting for it, has not noticed in time.
    """

    GRACE_S = 20.0  # rank 0 usually sees a broken connection by itself within this time

    def __init__(self, folder: Path, attempt: Path, ranks: int, on_death: Callable[[MachineError], None]) -> None:
        self.children: list[subprocess.Popen[bytes]] = []
        self.attempt, self._on_death, self._over = attempt, on_death, threading.Event()
        if ranks == 1:
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(shared, RANK="0", LOCAL_RANK="0")
        for rank in range(1, ranks):
            environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "infir2_core.launch.worker", str(folder), str(attempt)]
            with (attempt / f"rank-{rank}.log").open("wb") as log:
                self.children.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        threading.Thread(target=self._guard, name="worker-guard", daemon=True).start()

    def explain(self, error: Exception) -> Exception:
        """The failure of a worker when one failed by itself, else `error`."""
        deadline = time.monotonic() + 5
        while self.children and not self._failed() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._failed() or error

    def close(self, failed: bool) -> None:
        """Waits for the workers; ends them, soon, when rank 0 failed."""
        self._over.set()
        deadline = time.monotonic() + (5 if failed else 60)
        for child in self.children:
            if failed:
                child.terminate()
        for rank, child in enumerate(self.children, 1):
            try:
                child.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                write_exit(self.attempt, rank, 1, "ended by rank 0, which had failed or had waited too long")

    def _failed(self) -> MachineError | None:
        for rank, child in enumerate(self.children, 1):
            if child.poll() not in (None, 0, STOPPED):
                where, hint = str(self.attempt / f"rank-{rank}.log"), "the same command resumes the run"
                return MachineError(f"rank {rank} ended with exit code {child.returncode}", where, hint)
        return None

    def _guard(self) -> None:
        while not self._over.wait(0.5):
            error = self._failed()
            if error is not None:
                if not self._over.wait(self.GRACE_S):
                    self._on_death(error)
                return
