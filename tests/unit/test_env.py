"""`infir2 env check`: facts read from the right places, truthful verdicts, and exit 4 only when the plan cannot run."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from infir2_core import doctor, machine
from infir2_core.machine import Gpu, Machine
from infir2_core.precision.recipe import list_recipes, load_recipe

H200 = Gpu("NVIDIA H200", (9, 0), 150_000_000_000)
LAPTOP = Machine(
    python="3.11.7",
    system="Linux x86_64",
    cores=4,
    memory=16_000_000_000,
    disk_free=100_000_000_000,
    gpus=(),
    driver=None,
    torch="2.13.0+cpu",
    cuda=None,
    cublas=None,
    nccl=None,
    megatron_core="0.16.1",
    transformer_engine=None,
    flash_attention_4=None,
    deep_gemm=None,
)
SERVER = dataclasses.replace(
    LAPTOP, gpus=(H200,), driver="580.1", torch="2.11.0+cu130", cuda="13.0", cublas="13.1.0", nccl="2.28.9"
)

KERNELS = ("infir2", "infir2-lean", "infir2-fp32-scales", "infir2-wgrad2d", "infir2-codes-shift", "infir2-fp8-head")


@pytest.mark.parametrize(("text", "expected"), [("8589934592\n", 8 << 30), ("max\n", None), ("9" * 30, None)])
def test_memory_is_cut_by_the_containers_limit(text: str, expected: int | None, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(text)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = machine.memory(tmp_path)
    assert found == min(host, expected) if expected else abs(found - host) < 0.01 * host


@pytest.mark.parametrize(("text", "most"), [("50000 100000\n", 1), ("100000 100000", 1), ("max 100000\n", None)])
def test_cores_are_cut_by_the_containers_quota(text: str, most: int | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert machine.cores(tmp_path) == (most or len(os.sched_getaffinity(0)))


def test_driver_version_is_read_from_the_kernel(tmp_path: Path) -> None:
    report = tmp_path / "version"
    report.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
    )
    assert machine.driver(report) == "570.133.20"
    assert machine.driver(tmp_path / "absent") is None


def test_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert machine.disk_free(tmp_path / "a" / "b") == pytest.approx(machine.disk_free(tmp_path), rel=0.01)


def test_probe_agrees_with_torch() -> None:
    import torch

    found = machine.probe(Path.cwd())
    assert found.torch is not None and found.torch.split("+")[0] == torch.__version__.split("+")[0]
    assert len(found.gpus) == torch.cuda.device_count()
    assert found.cuda == torch.version.cuda


def fix(found: Machine, name: str) -> str:
    return next(fact.fix for fact in doctor.facts(found) if fact.name == name)


def test_each_lack_has_one_command() -> None:
    assert {fact.fix for fact in doctor.facts(LAPTOP)} == {""}  # a laptop needs no GPU packages
    assert fix(SERVER, "TransformerEngine") == "pip install 'infir2[megatron]'"
    assert fix(SERVER, "FlashAttention-4") == "pip install 'infir2[hopper]'"
    ampere = dataclasses.replace(SERVER, gpus=(Gpu("NVIDIA A100", (8, 0), 80_000_000_000),))
    assert fix(ampere, "FlashAttention-4") == ""  # it needs Hopper
    assert fix(dataclasses.replace(LAPTOP, torch=None), "torch") == "pip install 'torch>=2.10'"
    assert fix(dataclasses.replace(LAPTOP, torch="2.9.1+cpu"), "torch") == "pip install --upgrade 'torch>=2.10'"
    assert fix(dataclasses.replace(LAPTOP, torch="2.10.0a0+git12"), "torch") == ""
    assert (
        fix(dataclasses.replace(LAPTOP, megatron_core=None), "megatron-core") == "pip install 'megatron-core==0.16.1'"
    )
    # a driver without a GPU that torch sees: torch was built without CUDA
    assert "torch" in fix(dataclasses.replace(LAPTOP, driver="580.1"), "GPU")


@pytest.mark.parametrize("found", [LAPTOP, SERVER])
def test_every_recipe_gets_the_verdict_its_pieces_deserve(found: Machine) -> None:
    told = {v.recipe: v for v in doctor.verdicts(found)}
    assert list(told) == list_recipes()
    for name, said in told.items():
        recipe = load_recipe(name)
        if recipe.missing():
            assert said.runs == "not at all"
            assert all(piece in said.reason for piece in recipe.missing())
        else:
            kernels = found is SERVER and name in KERNELS
            assert said.runs == ("by reference" if recipe.uses_fp8 and not kernels else "native"), name
    assert told["bf16"].runs == "native"
    assert told["infir2"].runs == ("native" if found is SERVER else "by reference")
    assert "not at all" in {said.runs for said in told.values()}


def test_without_torch_nothing_runs() -> None:
    for said in doctor.verdicts(dataclasses.replace(LAPTOP, torch=None)):
        assert said.runs == "not at all"
    assert doctor.verdict("bf16", dataclasses.replace(LAPTOP, torch=None)).fix == "pip install 'torch>=2.10'"


def reasons(recipe: str, parameters: int, folder: Path, found: Machine, key: str) -> list[str]:
    return [p.what for p in doctor.plan_problems(recipe, "x", parameters, folder, found) if p.where == key]


# Master, two moments, gradient, what GEMMs read; lean: two halves of the master, two of codes and scales, ...
@pytest.mark.parametrize(
    ("recipe", "each"),
    [("fp32", 4 + 8 + 4), ("infir2", 4 + 8 + 4 + 1), ("bf16", 18), ("infir2-lean", 4 + 2 * (1 + 4 / 128) + 2 + 1)],
)
def test_the_training_state_must_fit_the_gpu_or_else_the_host(recipe: str, each: float, tmp_path: Path) -> None:
    most = int(LAPTOP.memory / each)
    assert reasons(recipe, most, tmp_path, LAPTOP, "model.size") == []
    assert "the host has 14.9 GB" in reasons(recipe, most + 1, tmp_path, LAPTOP, "model.size")[0]
    assert reasons(recipe, most + 1, tmp_path, SERVER, "model.size") == []  # the GPU's memory counts, not the host's
    refused = reasons(recipe, int(H200.memory / each) + 1, tmp_path, SERVER, "model.size")
    assert f"the GPU has {H200.memory / 2**30:.1f} GB" in refused[0]


def test_a_checkpoint_must_fit_the_disk(tmp_path: Path) -> None:
    free = machine.disk_free(tmp_path)
    assert "a checkpoint of size x" in reasons("bf16", free // 6, tmp_path, SERVER, "project.runs")[0]
    assert reasons("bf16", free // 24, tmp_path, SERVER, "project.runs") == []


def test_corpora_need_megatron_core(tmp_path: Path) -> None:
    found = doctor.plan_problems("bf16", "x", 1000, tmp_path, dataclasses.replace(LAPTOP, megatron_core=None))
    assert [(p.exit_code, p.hint) for p in found] == [(4, "pip install 'megatron-core==0.16.1'")]


def project(folder: Path, body: str) -> Path:
    path = folder / "infir2.toml"
    path.write_text("format = 1\n" + body, encoding="utf-8")
    return path


def test_without_a_project_it_reports_and_exits_0(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("env", "check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("Python", "torch", "GPU", "driver", "CUDA", "cuBLAS", "NCCL", "TransformerEngine", "megatron-core"):
        assert word in done.stdout
    assert "by reference" in done.stdout and "No project file" in done.stdout


def test_a_plan_that_runs_exits_0(run_cli: Any, tmp_path: Path) -> None:
    project(tmp_path, '[model]\nsize = "tiny"\n[cpt]\nrecipe = "infir2"\n')
    (tmp_path / "below").mkdir()
    done = run_cli("env", "check", "--json", cwd=tmp_path / "below")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["problems"] == [] and said["project"] == str(tmp_path / "infir2.toml")


def test_a_recipe_that_nothing_implements_exits_4_with_line_and_reason(run_cli: Any, tmp_path: Path) -> None:
    name = next(n for n in list_recipes() if load_recipe(n).missing())
    path = project(tmp_path, f'[model]\nsize = "tiny"\n[cpt]\nrecipe = "{name}"\n')
    done = run_cli("env", "check", "--project", path)
    assert done.returncode == 4
    assert f"recipe '{name}' cannot run here" in done.stderr and load_recipe(name).missing()[0] in done.stderr
    assert f"{path}:5: cpt.recipe" in done.stderr
    said = json.loads(run_cli("env", "check", "--project", path, "--json").stdout)
    assert said["problems"][0]["where"] == f"{path}:5: cpt.recipe"


def test_a_misspelt_recipe_or_key_exits_3_with_the_nearest(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("env", "check", "--project", project(tmp_path, '[cpt]\nrecipe = "infir"\n'))
    assert done.returncode == 3 and "infir2.toml:3" in done.stderr and "Did you mean 'infir2'?" in done.stderr
    done = run_cli("env", "check", "--project", project(tmp_path, "[cpt]\nstpes = 3\n"))
    assert done.returncode == 3 and "stpes" in done.stderr and "steps" in done.stderr


def test_a_missing_project_file_exits_3(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("env", "check", "--project", tmp_path / "none.toml")
    assert done.returncode == 3 and "none.toml" in done.stderr


def test_a_project_without_a_size_exits_3(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("env", "check", "--project", project(tmp_path, '[cpt]\nrecipe = "infir2"\n'))
    assert done.returncode == 3 and "names no size" in done.stderr and "infir2.toml" in done.stderr


def test_a_recipe_of_the_users_own_is_found_beside_the_project_file(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(load_recipe("coat").to_toml(), encoding="utf-8")
    path = project(tmp_path, '[model]\nsize = "tiny"\n[cpt]\nrecipe = "own.toml"\n')
    done = run_cli("env", "check", "--project", path, cwd=Path("/"))
    assert done.returncode == 4 and "own.toml" in done.stderr
