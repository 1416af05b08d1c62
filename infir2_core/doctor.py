"""Judges a machine: what is missing, which recipes run on it and how, and whether a plan fits.

Facts come from machine.py, recipes from precision/. A recipe runs `native` when every GEMM has a kernel of its own,
`by reference` when plain PyTorch arithmetic stands in for FP8 kernels (right, and slower than BF16), or `not at all`.
FP8 kernels exist for Hopper GPUs and recipes of 1x128 and 128x128 blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import Infir2Error, MachineError
from .launch.plan import checkpoint_bytes, state_bytes
from .machine import Machine, disk_free

TORCH_MINIMUM = (2, 10)
MEGATRON_CORE = "megatron-core==0.16.1"
# Its pin of apache-tvm-ffi excludes the one that FlashAttention-4 asks for; both run with the newer one.
DEEP_GEMM = "pip install --no-deps sgl-deep-gemm==0.1.3"
GB = 2**30


@dataclass(frozen=True)
class Fact:
    """One row of the report. `fix` is the command that supplies what is missing, empty when nothing is."""

    name: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Verdict:
    """How a recipe runs here: `native`, `by reference` or `not at all`, with the reason and the command that helps."""

    recipe: str
    runs: str
    reason: str
    fix: str = ""


def facts(machine: Machine) -> list[Fact]:
    """The machine as rows to read, each lack with its fix."""
    gpu = ", ".join(
        f"{g.name} (compute capability {g.capability[0]}.{g.capability[1]}, {g.memory / GB:.0f} GB)"
        for g in machine.gpus
    )
    blind = machine.driver is not None and not machine.gpus  # a driver, and a torch that cannot use it
    hopper = any(g.capability[0] >= 9 for g in machine.gpus)
    optional = "not installed (optional)"
    return [
        Fact("Python", machine.python),
        Fact("system", machine.system),
        Fact("cores", str(machine.cores)),
        Fact("memory", f"{machine.memory / GB:.1f} GB"),
        Fact("disk free", f"{machine.disk_free / GB:.1f} GB"),
        Fact("torch", machine.torch or "not installed", _torch_fix(machine)),
        Fact("GPU", gpu or "none that torch can use", "pip install --force-reinstall torch" if blind else ""),
        Fact("driver", machine.driver or "none"),
        Fact("CUDA", machine.cuda or "none in this build of torch"),
        Fact("cuBLAS", machine.cublas or "none"),
        Fact("NCCL", machine.nccl or "none"),
        Fact("megatron-core", machine.megatron_core or "not installed", _unless(machine.megatron_core, MEGATRON_CORE)),
        Fact(
            "TransformerEngine",
            machine.transformer_engine or optional,
            _unless(machine.transformer_engine or not machine.gpus, "infir2[megatron]"),
        ),
        Fact(
            "FlashAttention-4",
            machine.flash_attention_4 or optional,
            _unless(machine.flash_attention_4 or not hopper, "infir2[hopper]"),
        ),
        Fact("DeepGEMM", machine.deep_gemm or optional, "" if machine.deep_gemm or not hopper else DEEP_GEMM),
    ]


def _unless(present: object, package: str) -> str:
    return "" if present else f"pip install '{package}'"


def _torch_fix(machine: Machine) -> str:
    wanted = ".".join(map(str, TORCH_MINIMUM))
    if machine.torch is None:
        return f"pip install 'torch>={wanted}'"
    found = re.match(r"(\d+)\.(\d+)", machine.torch)
    if found and (int(found[1]), int(found[2])) < TORCH_MINIMUM:
        return f"pip install --upgrade 'torch>={wanted}'"
    return ""


def verdicts(machine: Machine) -> list[Verdict]:
    """One verdict for every recipe that ships with infir2, in the order of `recipes list`."""
    from .precision.recipe import list_recipes

    return [verdict(name, machine) for name in list_recipes()]


def verdict(name: str, machine: Machine) -> Verdict:
    """How the recipe called `name` runs on `machine`.

    Raises:
        InputError: there is no such recipe.
    """
    from .precision.recipe import load_recipe
    from .precision.support import block_scaled

    recipe = load_recipe(name)
    if missing := recipe.missing():
        return Verdict(name, "not at all", f"not implemented: {', '.join(missing)}")
    if fix := _torch_fix(machine):
        return Verdict(name, "not at all", "torch is missing or too old", fix)
    where = machine.gpus[0].name if machine.gpus else "the CPU"
    if recipe.uses_fp8 and machine.gpus and machine.gpus[0].capability[0] == 9 and block_scaled(recipe):
        return Verdict(name, "native", f"FP8 kernels on {where}; batches whose tokens divide by 128")
    if recipe.uses_fp8:
        return Verdict(name, "by reference", f"FP8 arithmetic in plain PyTorch on {where}, slower than BF16")
    return Verdict(name, "native", f"torch's own kernels on {where}")


def plan_problems(recipe: str, size: str, parameters: int, runs: Path, machine: Machine) -> list[Infir2Error]:
    """Why a model of `parameters` (called `size`) cannot be trained with `recipe` here; empty when it can.

    Lower bounds only: activations come on top of the training state. `runs` is the folder of the runs; `where` of each
    problem is a key of the project file.

    Raises:
        InputError: there is no such recipe.
    """
    from .precision.recipe import load_recipe

    found: list[Infir2Error] = []
    how = verdict(recipe, machine)
    if how.runs == "not at all":
        hint = how.fix or "infir2 env check lists the recipes that run here"
        found.append(MachineError(f"recipe '{recipe}' cannot run here: {how.reason}", "cpt.recipe", hint))
    if machine.megatron_core is None:
        fix = _unless(None, MEGATRON_CORE)
        found.append(MachineError("megatron-core is not installed, and corpora are read through it", "", fix))
    each = state_bytes(load_recipe(recipe))
    state, room = parameters * each, machine.training_memory
    if state > room:
        whose = "GPU" if machine.gpus else "host"
        found.append(
            MachineError(
                f"size {size} needs {state / GB:.1f} GB for its training state alone"
                f" ({parameters / 1e9:.2f} B parameters x {each:g} bytes); the {whose} has {room / GB:.1f} GB",
                "model.size",
                "choose a smaller size, or a machine with more memory",
            )
        )
    saved, free = parameters * checkpoint_bytes(load_recipe(recipe)), disk_free(runs)
    if saved > free:
        found.append(
            MachineError(
                f"a checkpoint of size {size} takes {saved / GB:.1f} GB; {free / GB:.1f} GB are free in {runs}",
                "project.runs",
                "free some space, or point project.runs at a larger disk",
            )
        )
    return found
