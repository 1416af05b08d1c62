"""Starts Python commands from a process that has imported torch and Megatron's datasets already, by forking it.

Importing these takes two to four seconds of a core, and the suite types hundreds of commands. What is forked is a
process with an environment, folder, streams and exit code of its own; nothing of this project is imported before.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Read when Python, OpenMP or torch start: a command that wants another value of these needs a start of its own.
EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "MALLOC_", "TRITON_")


class WarmPython:
    """Forks on request; one command at a time."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._server = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def fits(self, env: dict[str, str]) -> bool:
        """Whether a process with this environment would have started as the warm one did."""
        names = {name for name in {*env, *os.environ} if name.startswith(EARLY) and name != "PYTHONPATH"}
        return hasattr(os, "pidfd_open") and all(env.get(name) == os.environ.get(name) for name in names)

    def run_module(
        self, module: str, arguments: Sequence[str], cwd: Path | None, env: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """`python -m module arguments`, with the result of `subprocess.run(..., capture_output=True, text=True)`.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds; the process has been killed then.
        """
        assert self._server.stdin and self._server.stdout
        command = [sys.executable, "-m", module, *arguments]
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, name) for name in ("out", "err")]
            request = {"module": module, "arguments": list(arguments), "env": env, "files": files, "timeout": timeout}
            self._server.stdin.write(json.dumps(request | {"cwd": str(cwd or Path.cwd())}) + "\n")
            code, late = json.loads(self._server.stdout.readline())
            out, err = (Path(file).read_text() for file in files)
        if late:
            raise subprocess.TimeoutExpired(command, timeout, out, err)
        return subprocess.CompletedProcess(command, code, out, err)


def serve() -> dict[str, Any] | None:
    """Forks for each request on standard input and answers [exit code, whether it was killed as too late].

    Returns:
        In a forked process: its request. In this one: None, when standard input is closed.
    """
    for line in iter(sys.stdin.readline, ""):
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            return request
        watch = os.pidfd_open(child)
        ended, *_ = select.select([watch], [], [], request["timeout"])
        os.close(watch)
        if not ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), not ended]), flush=True)
    return None


def become(request: dict[str, Any]) -> None:
    """Makes this process the one that was asked for, up to its first line."""
    for number, file in enumerate([os.devnull, *request["files"]]):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = [request["cwd"], *request["env"].get("PYTHONPATH", "").split(os.pathsep), *sys.path[1:]]
    sys.argv[1:] = request["arguments"]
    random.seed()


if __name__ == "__main__":
    with warnings.catch_warnings(action="ignore"):
        import megatron.core.datasets.gpt_dataset  # noqa: F401
        import psutil  # noqa: F401
        import pydantic  # noqa: F401
        import rich.console  # noqa: F401
        import safetensors.torch  # noqa: F401
        import tokenizers  # noqa: F401
        import torch  # noqa: F401
        import typer  # noqa: F401

    assert "huggingface_hub" not in sys.modules, "it reads its environment when it is imported"
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads may not be forked"
    gc.collect()
    gc.freeze()  # else every child walks, and by that copies, all of this at its end: two seconds
    if asked := serve():
        become(asked)
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
