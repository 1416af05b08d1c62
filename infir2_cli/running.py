"""Runs a prepared run folder in this process: lock, signals, workers, progress, and how it ended.

Shared by the commands that train. Heavy imports wait until the signal handlers are in place, so that a stop that comes
during start-up still ends with exit code 75.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import report_error, say

if TYPE_CHECKING:
    from infir2_core.launch.local import RunFolder
    from infir2_core.train.loop import Outcome
    from infir2_core.train.stop import StopRequest


def run(folder: RunFolder) -> tuple[int, dict[str, Any]]:
    """Trains to the end or to a requested stop; returns the exit code and the result for `--json`.

    Raises:
        Infir2Error: whatever ended the run, already recorded in the attempt's exit file.
    """
    from infir2_core.config.runfile import write_config
    from infir2_core.errors import STOPPED
    from infir2_core.runs import RunLock, start_attempt, write_exit
    from infir2_core.train.stop import StopRequest

    config = folder.config
    # Signals count from here on, while torch is still being imported.
    with RunLock(folder.path), StopRequest(folder.path) as stop:
        attempt = start_attempt(folder.path)
        write_config(config, folder.path / "config.toml")
        log = attempt / "rank-0.log"
        say(f"{'run' if folder.status == 'resume' else 'new run'} {config.name}  ({folder.path})")
        say(f"follow it: tail -f {log}    metrics: {folder.path / 'metrics.jsonl'}")
        outcome = _train(folder, attempt, log, stop)
        code = STOPPED if outcome.stopped else 0
        write_exit(attempt, 0, code)
    result = {"run": str(folder.path), "step": outcome.step, "steps": config.train.steps, "loss": outcome.loss}
    result |= {"eval_loss": outcome.eval_loss, "stopped": outcome.stopped}
    if outcome.stopped:
        say(f"stopped at step {outcome.step} ({outcome.stopped}); the same command resumes it")
    else:
        say(f"{config.name} is complete: step {outcome.step} of {config.train.steps}")
    return code, result


def _train(folder: RunFolder, attempt: Path, log: Path, stop: StopRequest) -> Outcome:
    import torch

    from infir2_core.engines.ranks import Ranks
    from infir2_core.errors import Infir2Error, MachineError
    from infir2_core.launch.local import Workers
    from infir2_core.runs import write_exit
    from infir2_core.train.loop import Run

    from .progress import TrainingView

    def die(error: MachineError) -> None:
        write_exit(attempt, 0, error.exit_code, error.what)
        workers.close(failed=True)
        report_error(error)
        os._exit(error.exit_code)  # the main thread hangs in a collective that nobody will join

    config, failed = folder.config, True
    workers = Workers(folder.path, attempt, config.ranks, die)
    try:
        with TrainingView(config.train.steps, log) as view:
            ranks = Ranks.join(config.ranks, config.device)
            outcome = Run(config, folder.recipe, folder.path, ranks, view, stop).train()
            ranks.leave()
        failed = False
        return outcome
    except BaseException as error:
        shown: BaseException = error
        if isinstance(error, torch.OutOfMemoryError):
            hint = (
                "make microbatches smaller (--micro-batch or --seq-len; --row-tokens), or --recompute selective or full"
            )
            shown = MachineError(f"out of memory: {str(error).splitlines()[0]}", "training", hint)
        elif isinstance(error, Exception) and not isinstance(error, Infir2Error):
            shown = workers.explain(error)
        write_exit(attempt, 0, getattr(shown, "exit_code", 1), str(shown))
        raise shown from error
    finally:
        workers.close(failed)
