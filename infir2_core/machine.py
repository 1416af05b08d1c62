"""What this machine has: cores, memory, disk, GPUs, and the versions of what trains on them.

Pure probing. Nothing is judged here, nothing is printed, and nothing missing is an error: it is None or an empty list.
Limits of containers count: a cgroup that grants 8 GB of a 512 GB host makes a machine of 8 GB. torch is imported by the
probes that need it, never by importing this module.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import MachineError, UsageError

CGROUP = Path("/sys/fs/cgroup")
DRIVER = Path("/proc/driver/nvidia/version")
LIBRARIES = Path("/proc/self/maps")


@dataclass(frozen=True)
class Gpu:
    """One CUDA device. Memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class Machine:
    """What was found. Memory and disk in bytes; versions as their packages write them, None when absent."""

    python: str
    system: str
    cores: int
    memory: int
    disk_free: int
    gpus: tuple[Gpu, ...]
    driver: str | None
    torch: str | None
    cuda: str | None
    cublas: str | None
    nccl: str | None
    megatron_core: str | None
    transformer_engine: str | None
    flash_attention_4: str | None
    deep_gemm: str | None

    @property
    def training_memory(self) -> int:
        """Bytes one training process may use: a GPU's own memory where there is one, else the host's."""
        return max(gpu.memory for gpu in self.gpus) if self.gpus else self.memory


def probe(folder: Path) -> Machine:
    """Look at this machine; `folder` (or its nearest existing parent) says which disk is meant."""
    gpus = find_gpus()
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=cores(),
        memory=memory(),
        disk_free=disk_free(folder),
        gpus=gpus,
        driver=driver(),
        torch=version("torch"),
        cuda=_cuda(),
        cublas=_cublas() if gpus else None,
        nccl=_nccl(),
        megatron_core=version("megatron-core"),
        transformer_engine=version("transformer-engine"),
        flash_attention_4=version("flash-attn-4"),
        deep_gemm=version("sgl-deep-gemm"),
    )


def version(package: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores(cgroup: Path = CGROUP) -> int:
    """CPU cores this process may use: its affinity, cut by the container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        allowed = min(allowed, max(1, round(int(quota) / int(period))))
    return allowed


def memory(cgroup: Path = CGROUP) -> int:
    """Bytes of host memory this process may use: the host's total, cut by the container's limit."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = _read(cgroup / "memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def disk_free(folder: Path) -> int:
    """Free bytes where `folder` is or will be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def driver(source: Path = DRIVER) -> str | None:
    """Version of the NVIDIA kernel driver."""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)*)\b", _read(source))
    return found.group(1) if found else None


def find_gpus() -> tuple[Gpu, ...]:
    """CUDA devices torch can use."""
    if version("torch") is None:
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return tuple(Gpu(p.name, (p.major, p.minor), p.total_memory) for p in found)


def _cuda() -> str | None:
    if version("torch") is None:
        return None
    import torch

    return torch.version.cuda


def _nccl() -> str | None:
    if _cuda() is None:
        return None
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _cublas() -> str | None:
    """Version of the cuBLAS that torch has loaded: the library itself is asked, since several may be installed."""
    import torch

    small = torch.zeros(8, 8, device="cuda")
    torch.mm(small, small)  # torch loads cuBLAS with the first matrix product
    path = re.search(r"(/\S*libcublas\.so\S*)", _read(LIBRARIES))
    if path is None:
        return None
    library, value, parts = ctypes.CDLL(path.group(1)), ctypes.c_int(), []
    for wanted in range(3):  # libraryPropertyType: major, minor, patch
        if library.cublasGetProperty(wanted, ctypes.byref(value)) != 0:
            return None
        parts.append(str(value.value))
    return ".".join(parts)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def pick_device(wanted: str | None) -> str:
    """`cpu` or `cuda`: what was asked for, else cuda when there is a CUDA device.

    Raises:
        UsageError: another word.
        MachineError: cuda was asked for and there is none.
    """
    if wanted not in (None, "cpu", "cuda"):
        raise UsageError(f"--device is '{wanted}'", hint="cpu or cuda")
    if wanted == "cpu":
        return "cpu"
    found = bool(find_gpus())
    if wanted == "cuda" and not found:
        raise MachineError("this machine has no CUDA device", "--device cuda", "infir2 env check tells what is missing")
    return "cuda" if found else "cpu"
