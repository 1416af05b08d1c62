"""Runs the CUDA kernels of ops/hopper/cuda on the CPU: the same sources, compiled by g++ behind cuda_on_cpu.h."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from infir2_core.ops.hopper import cuda
from infir2_core.ops.hopper.cuda import Argument, packed

COMPILER = shutil.which("g++")
HEADER = Path(__file__).with_name("cuda_on_cpu.h")
APART = ("-ffp-contract=off",)
FUSED = ("-ffp-contract=fast", "-mfma", "-fexpensive-optimizations")  # products and sums in one operation, as on a GPU
RUN = """
struct Arguments {{ {fields}; }};
static Arguments* given;
static void enter() {{
    {kernel}({names});
    fibers[threadIdx.x].waits = DONE;
    setcontext(&scheduler);
}}
extern "C" bool run(int grid, int block, Arguments* arguments) {{  // whether every thread came to its end
    given = arguments;
    gridDim.x = grid;
    fibers.resize(block);
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {{
        for (int i = 0; i < block; ++i) {{
            Fiber& f = fibers[i];
            f.stack.resize(1 << 16);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.waits = NOBODY;
            f.copies.clear();
            exchanges[i] = 0;
            makecontext(&f.context, enter, 0);
        }}
        for (bool running = true; running;) {{
            running = false;
            for (int warp = 0; warp < block; warp += 32) {{
                for (bool moved = true; moved;) {{
                    moved = false;
                    for (int i = warp; i < warp + 32; ++i) {{
                        if (fibers[i].waits == BLOCK || fibers[i].waits == DONE) continue;
                        threadIdx.x = i;
                        swapcontext(&scheduler, &fibers[i].context);
                        moved = true;
                    }}
                }}
            }}
            int arrived[16] = {{}}, alive = 0;
            for (Fiber& f : fibers) arrived[f.barrier] += f.waits == BLOCK, alive += f.waits != DONE;
            for (Fiber& f : fibers) {{
                if (f.waits != BLOCK || arrived[f.barrier] < (f.barrier ? f.threads : alive)) continue;
                f.waits = NOBODY;
                running = true;
            }}
            if (alive && !running) return false;
        }}
    }}
    return true;
}}
"""


def launch(
    file: str,
    defines: tuple[tuple[str, int], ...],
    grid: int,
    block: int,
    shared: int,
    arguments: Sequence[Argument],
    device: torch.device,
    options: tuple[str, ...] = APART,
) -> None:
    """In place of `infir2_core.ops.hopper.cuda.launch`; options: of the compiler."""
    text = cuda.source(file, without="ptx.cuh")
    library = _library(text, f"infir2_{Path(file).stem}", defines, shared, options)
    assert library.run(grid, block, packed(tuple(arguments))), f"threads of {file} wait for each other for ever"


def compiled(text: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """A library of C++ text."""
    key = hashlib.sha256(f"{text}{options}".encode()).hexdigest()[:16]
    source, library = _folder() / f"{key}.cpp", _folder() / f"{key}.so"
    source.write_text(text)
    command = [str(COMPILER), "-std=c++17", "-O1", "-shared", "-fPIC", "-w", *options]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def fuses() -> bool:
    """Whether this processor runs what `FUSED` compiles."""
    about = Path("/proc/cpuinfo")
    return COMPILER is not None and about.is_file() and " fma " in about.read_text()


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="cuda-on-cpu-"))


@cache
def _library(
    text: str, kernel: str, defines: tuple[tuple[str, int], ...], shared: int, options: tuple[str, ...]
) -> ctypes.CDLL:
    declared = re.search(rf"\b{kernel}\((.*?)\)\s*{{", text, re.DOTALL)
    assert declared
    parameters = [" ".join(p.split()) for p in declared[1].split(",")]
    names = ", ".join("given->" + p.split()[-1].lstrip("*") for p in parameters)
    dynamic = re.search(r"extern __shared__ __align__\(16\) (\w+) (\w+)\[\]", text)
    if dynamic:  # all blocks run after each other, so that one buffer will do
        text = f"alignas(16) static unsigned char dynamic_shared[{max(shared, 16)}];\n" + text.replace(
            dynamic[0], f"{dynamic[1]}* {dynamic[2]} = reinterpret_cast<{dynamic[1]}*>(dynamic_shared)"
        )
    text = text.replace("__shared__", "static")
    text = HEADER.read_text() + text + RUN.format(kernel=kernel, fields="; ".join(parameters), names=names)
    return compiled(text, (*options, *(f"-D{name}={value}" for name, value in defines)))
