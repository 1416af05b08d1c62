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


def main(folder: Path, attempt: Path) -> int:
    """Trains as the rank that the environment names; returns the exit code."""
    rank = int(os.environ["RANK"])
    try:
        config = read_config(folder)
        ranks = Ranks.join(config.ranks, config.device)
        outcome = Run(config, load_recipe_file(folder), folder, ranks, Silent()).train()
        ranks.leave()
        code = STOPPED if outcome.stopped else 0
        write_exit(attempt, rank, code)
    except Infir2Error as error:
        print(error, file=sys.stderr)
        write_exit(attempt, rank, error.exit_code, error.what)
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
