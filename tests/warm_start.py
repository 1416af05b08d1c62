"""Starts Python commands from processes that have imported torch and Megatron's datasets already, by forking them.

Importing these takes two to four seconds of a core, and the suite types hundreds of commands. What is forked is a
process with an environment, folder, streams and exit code of its own; nothing of this project is imported before. Two
processes with different hash seeds are forked in turn, so that what depends on the order of a set still shows.

What this cannot show: a module that the project uses and forgot to import, and what importing prints. `run_cli(...,
cold=True)` starts Python.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Read when Python, OpenMP, torch or the C library start: a command that wants another value of these starts itself.
EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH", "MALLOC_", "TRITON_", "LC_", "LANG")
EARLY += ("TMP", "TEMP", "TZ")
HASH_SEEDS = ("1", "2")
PR_SET_CHILD_SUBREAPER = 36


class WarmPython:
    """Forks on request; one command at a time."""

    def __init__(self) -> None:
        self._start = dict(os.environ)
        self._servers = [self._serve(seed) for seed in HASH_SEEDS]
        self._turns = itertools.cycle(range(len(HASH_SEEDS)))

    def _serve(self, seed: str) -> subprocess.Popen[str]:
        environment, pipe = self._start | {"PYTHONHASHSEED": seed}, subprocess.PIPE
        command = [sys.executable, __file__]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment)

    def fits(self, env: dict[str, str]) -> bool:
        """Whether a process with this environment would have started as the warm ones did."""
        names = {name for name in {*env, *self._start} if name.startswith(EARLY) and name != "PYTHONPATH"}
        return hasattr(os, "pidfd_open") and all(env.get(name) == self._start.get(name) for name in names)

    def run_module(
        self, module: str, arguments: Sequence[str], cwd: Path | None, env: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """`python -m module arguments`, with the result of `subprocess.run(..., capture_output=True, text=True)`.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds; the process and what it left behind have been killed.
        """
        command, turn = [sys.executable, "-m", module, *arguments], next(self._turns)
        server = self._servers[turn]
        assert server.stdin and server.stdout
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, name) for name in ("out", "err")]
            request = {"module": module, "arguments": list(arguments), "env": env, "files": files, "timeout": timeout}
            try:
                server.stdin.write(json.dumps(request | {"cwd": str((cwd or Path.cwd()).resolve(strict=True))}) + "\n")
                code, late = json.loads(server.stdout.readline())
            except BaseException:  # it has died, or its answer would be taken for that of the next command
                server.kill()
                self._servers[turn] = self._serve(HASH_SEEDS[turn])
                raise
            out, err = (Path(file).read_text() for file in files)
        if late:
            raise subprocess.TimeoutExpired(command, timeout, out, err)
        return subprocess.CompletedProcess(command, code, out, err)

    def close(self) -> None:
        """Ends the processes."""
        for server in self._servers:
            server.communicate()


def serve() -> dict[str, Any] | None:
    """Forks for each request on standard input and answers [exit code, whether it took too long].

    As a pipe would, it waits for every process that the command leaves behind.

    Returns:
        In a forked process: its request. In this one: None, when standard input is closed.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for line in iter(sys.stdin.readline, ""):
        request: dict[str, Any] = json.loads(line)
        deadline, child = time.monotonic() + request["timeout"], os.fork()
        if child == 0:
            return request
        watch = os.pidfd_open(child)
        ended, *_ = select.select([watch, sys.stdin], [], [], request["timeout"])
        os.close(watch)
        if watch not in ended:  # too late, or nobody waits for the answer any more
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        late = watch not in ended or not _alone(deadline)
        print(json.dumps([os.waitstatus_to_exitcode(status), late]), flush=True)
    return None


def _alone(deadline: float) -> bool:
    """Waits for orphans, and kills them at the deadline; whether they ended by themselves."""
    while time.monotonic() < deadline:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.01)
        except ChildProcessError:
            return True
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for orphan in children:
        os.kill(int(orphan), signal.SIGKILL)
    return False


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
    numpy.random.seed()


if __name__ == "__main__":
    with warnings.catch_warnings(action="ignore"):
        import megatron.core.datasets.gpt_dataset  # noqa: F401
        import numpy
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
