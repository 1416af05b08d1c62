"""Entry point of ranks other than 0: `python -m infir2_core.launch.worker RUN_FOLDER ATTEMPT_FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ..engines.ranks import Ranks
from ..errors import STOPPED, Infir2Error
from ..runs import read_config, write_exit
from ..train.loop import Run
from ..train.stop import StopRequest
from .local import load_recipe_file


class Silent:
    """A watcher that only keeps notes, in this rank's log."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def gemms(self, rows: list[dict[str, Any]]) -> None:
        pass

    def step(self, record: dict[str, Any]) -> None:
        pass

    def evaluated(self, record: dict[str, Any]) -> None:
        pass

    def sampled(self, record: dict[str, Any]) -> None:
        pass


def main(folder: Path, attempt: Path) -> int:
    """Trains as the rank that the environment names; returns the exit code, which is also written to the attempt."""
    rank = int(os.environ["RANK"])
    try:
        with StopRequest(folder) as stop:
            config = read_config(folder)
            ranks = Ranks.join(config.ranks, config.device)
            outcome = Run(config, load_recipe_file(folder), folder, ranks, Silent(), stop).train()
            ranks.leave()
    except Infir2Error as error:
        print(error, file=sys.stderr)
        write_exit(attempt, rank, error.exit_code, error.what)
        return error.exit_code
    except Exception as error:
        write_exit(attempt, rank, 1, f"{type(error).__name__}: {error}")
        raise
    code = STOPPED if outcome.stopped else 0
    write_exit(attempt, rank, code)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
