"""What every test shares: fixed threads, no network, and the command line as a user types it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm_start import WarmPython

ROOT = Path(__file__).resolve().parent.parent
# Read by OpenMP when torch is imported, so they are set before any test module is: the same sums in every run, and two
# workers on two cores do not fight.
FIXED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
}
if not os.path.exists("/dev/nvidiactl"):
    FIXED["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run in its CPU interpreter
os.environ.update(FIXED)

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "cluster: needs Slurm")
    config.addinivalue_line("markers", "slow: takes minutes; run with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="slow: run with --slow")
    gpu = pytest.mark.skip(reason="gpu: no CUDA device on this machine")
    cluster = pytest.mark.skip(reason="cluster: no Slurm (sbatch) on this machine")
    no_gpu = any("gpu" in item.keywords for item in items) and not _has_gpu()
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(slow)
        if item.get_closest_marker("gpu") and no_gpu:
            item.add_marker(gpu)
        if item.get_closest_marker("cluster") and shutil.which("sbatch") is None:
            item.add_marker(cluster)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def run_cli() -> Iterator[RunCli]:
    """`run_cli("env", "check", cwd=tmp_path)`: the command in a process of its own, output captured as text.

    Keyword arguments: `cwd`, `env` (added to the environment), `timeout` in seconds, `cold` to start Python instead of
    forking a process that has imported torch.
    """

    warm = WarmPython()

    def run(
        *args: object,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 300,
        cold: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        words, wanted = [str(word) for word in args], {**os.environ, "PYTHONPATH": path, **(env or {})}
        if not cold and warm.fits(wanted):
            return warm.run_module("infir2_cli", words, cwd, wanted, timeout)
        command = [sys.executable, "-m", "infir2_cli", *words]
        return subprocess.run(command, cwd=cwd, env=wanted, capture_output=True, text=True, timeout=timeout)

    yield run
    warm.close()
