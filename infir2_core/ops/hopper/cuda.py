"""CUDA kernels compiled when they are first needed, by the NVRTC that every CUDA build of torch brings.

Nothing but torch and the driver is needed on the user's machine: no compiler, no headers, no built extension. Compiled
code is kept (`kept`), so that later processes start at once. Sources lie in cuda/; constants
are defines, so that one source gives a kernel for each combination that is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import struct
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .kept import kept

SOURCES = Path(__file__).parent / "cuda"
ARCHITECTURE = "sm_90a"
MULTIPROCESSORS = 132  # of an H100 and an H200; a constant, so that the order of sums does not depend on the card
SHARED_BYTES = 226 * 1024  # dynamic ones of a block at most, beside 1 KiB that a kernel may declare
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute

Argument = Tensor | int | float | bytes | None | tuple["Argument", ...]


def launch(
    file: str,
    defines: tuple[tuple[str, int], ...],
    grid: int,
    block: int,
    shared: int,
    arguments: Sequence[Argument],
    device: torch.device,
) -> None:
    """Queues the kernel of cuda/`file` (`infir2_` and the file's stem) on the current stream of `device`.

    Args:
        file: name of the source.
        defines: constants of this variant, sorted by name.
        grid: blocks.
        block: threads of a block.
        shared: bytes of dynamic shared memory.
        arguments: in the kernel's order; tensors and None become pointers, int becomes int64, float becomes double,
            bytes stay as they are, a tuple becomes a struct of these.
        device: where the tensors live.

    Raises:
        RuntimeError: the source does not compile (with the compiler's log), or the driver refuses the launch.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    with torch.cuda.device(index):
        _bind(index)
        function = _function(file, defines, shared, index)
        # Each by its address: the compiler lays them out, and pads what wants more than 16 bytes of alignment.
        fields = [packed(argument) for argument in arguments]
        values = ctypes.create_string_buffer(b"".join(fields))
        ends = itertools.accumulate(map(len, fields), initial=ctypes.addressof(values))
        addresses = (ctypes.c_void_p * (len(fields) + 1))(*ends)
        stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
        code = _driver().cuLaunchKernel(function, grid, 1, 1, block, 1, 1, shared, stream, addresses, None)
    _check(code, f"launching {file}")


def packed(argument: Argument) -> bytes:
    """The bytes of one kernel parameter."""
    if isinstance(argument, bytes):
        return argument
    if isinstance(argument, tuple):
        return b"".join(map(packed, argument))
    if isinstance(argument, Tensor):
        return struct.pack("<Q", argument.data_ptr())
    if argument is None:
        return struct.pack("<Q", 0)
    return struct.pack("<d", argument) if isinstance(argument, float) else struct.pack("<q", argument)


def encode_map(address: int, rows: int, cols: int, itemsize: int, box_cols: int, box_rows: int) -> bytes:
    """A tensor map: how the copy engine finds boxes of a matrix [rows, cols] at `address`, in 128-byte swizzle.

    Args:
        address: of a contiguous matrix, divisible by 16 as its rows are.
        rows: of the matrix.
        cols: of the matrix.
        itemsize: 1 for bytes, 4 for float32.
        box_cols: columns of a box, 128 bytes at most.
        box_rows: rows of a box, 256 at most.

    Raises:
        RuntimeError: the driver does not take such a matrix.
    """
    kind = {1: 0, 4: 7}[itemsize]  # CUtensorMapDataType
    swizzle_128b, promotion_256b = 3, 3
    _bind(torch.cuda.current_device())
    space = ctypes.create_string_buffer(128 + 64)
    at = -(-ctypes.addressof(space) // 64) * 64  # the driver wants it aligned
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), kind, 2, ctypes.c_void_p(address), (ctypes.c_uint64 * 2)(cols, rows),
        (ctypes.c_uint64 * 1)(cols * itemsize), (ctypes.c_uint32 * 2)(box_cols, box_rows),
        (ctypes.c_uint32 * 2)(1, 1), 0, swizzle_128b, promotion_256b, 0,
    )  # fmt: skip
    _check(code, f"a tensor map of {rows} x {cols}")
    return ctypes.string_at(at, 128)


_threads = threading.local()


def _bind(index: int) -> None:
    """Makes a device's context that of this thread: the driver wants one, torch sets it when it works there."""
    bound = _threads.__dict__.setdefault("devices", set())
    if index not in bound:
        torch.cuda.synchronize(index)
        bound.add(index)


@cache
def _function(file: str, defines: tuple[tuple[str, int], ...], shared: int, index: int) -> ctypes.c_void_p:
    module, function, driver = ctypes.c_void_p(), ctypes.c_void_p(), _driver()
    if driver.cuModuleLoadData(ctypes.byref(module), compiled(source(file), file, defines)):
        # What was kept may be damaged; what is compiled now is not.
        fresh = compiled(source(file), file, defines, again=True)
        _check(driver.cuModuleLoadData(ctypes.byref(module), fresh), f"loading {file}")
    name = f"infir2_{Path(file).stem}".encode()
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name), f"finding the kernel of {file}")
    _check(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared), f"shared memory of {file}")
    return function


@cache
def source(file: str, without: str = "") -> str:
    """The text of a kernel with what it includes, `without` one of the included files."""
    text = (SOURCES / file).read_text(encoding="utf-8") if file != without else ""
    return re.sub(r'^#include "(.+)"\n', lambda found: source(found[1], without), text, flags=re.MULTILINE)


def compiled(text: str, name: str, defines: tuple[tuple[str, int], ...], again: bool = False) -> bytes:
    """Machine code of a source, from the cache (not if `again`) or from NVRTC."""
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", *(f"-D{key}={value}" for key, value in defines)]
    key = hashlib.sha256("\0".join([text, *options, str(torch.version.cuda)]).encode()).hexdigest()[:32]
    folder = kept()
    if folder is None:
        return _compile(text, name, options)
    file = folder / f"{key}.cubin"
    if file.is_file() and not again:
        return file.read_bytes()
    code = _compile(text, name, options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_bytes(code)
        aside.replace(file)  # several ranks may compile the same kernel at once
    except OSError:
        pass  # a home that cannot be written costs a second at each start, nothing else
    return code


def _compile(text: str, name: str, options: list[str]) -> bytes:
    lib, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    _check(lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None), "NVRTC")
    encoded = [option.encode() for option in options]
    failed = lib.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
    if failed:
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name} with {' '.join(options)} does not compile:\n{log.value.decode()}")
    _check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "NVRTC")
    code = ctypes.create_string_buffer(size.value)
    _check(lib.nvrtcGetCUBIN(program, code), "NVRTC")
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


@cache
def _nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".")[0]
    return _library(f"libnvrtc.so.{major}")


@cache
def _driver() -> ctypes.CDLL:
    return _library("libcuda.so.1")


def _library(name: str) -> ctypes.CDLL:
    """A shared library by the loader's search, or from the wheels and the toolkit that torch may use."""
    found = [name]
    for root in (Path(torch.__file__).parents[1] / "nvidia", Path("/usr/local/cuda")):
        found += sorted(str(path) for path in root.rglob(f"{name}*"))
    for path in found:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise RuntimeError(f"{name} was not found, neither by the loader nor beside torch nor in /usr/local/cuda")


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA code {code}")
