"""`infir2 init`: a file that loads, is never overwritten by accident, and names what is wrong otherwise."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

SIZES = ("tiny", "small", "0.5b", "1.5b", "3b", "7b")


@pytest.mark.parametrize("size", SIZES)
def test_the_file_loads_with_the_real_schema(size: str, tmp_path: Path) -> None:
    from infir2_cli.commands.init import project_text
    from infir2_core.config.project import load_project

    path = tmp_path / "infir2.toml"
    text = project_text('odd "name" \\ ü', size)
    path.write_text(text, encoding="utf-8")
    project = load_project(path)
    assert project.project.name == 'odd "name" \\ ü'
    assert project.model.size == size
    assert project.model.from_ == ("" if size in ("tiny", "small") else f"Qwen/Qwen2.5-{size.upper()}")
    assert project.cpt.settings() == {"recipe": "infir2"}
    assert project.data["text"].specs == ["data/text"]


@pytest.mark.parametrize("size", SIZES)
def test_settings_offered_in_comments_are_valid_too(size: str, tmp_path: Path) -> None:
    from infir2_cli.commands.init import project_text
    from infir2_core.config.project import load_project

    text, offered = re.subn(r"^# (\w+ = .*)$", r"\1", project_text("p", size), flags=re.MULTILINE)
    assert offered >= 2
    (tmp_path / "infir2.toml").write_text(text, encoding="utf-8")
    assert load_project(tmp_path / "infir2.toml").cpt.settings()["steps"] > 0


def test_it_writes_one_file_named_after_the_folder(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("init", "fresh/project", cwd=tmp_path, cold=True)
    assert done.returncode == 0, done.stderr
    written = tmp_path / "fresh" / "project" / "infir2.toml"
    assert tomllib.loads(written.read_text(encoding="utf-8"))["project"]["name"] == "project"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [written]
    assert "infir2 cpt" in done.stdout


def test_an_existing_file_is_kept_unless_forced(run_cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "infir2.toml"
    path.write_text("precious", encoding="utf-8")
    done = run_cli("init", cwd=tmp_path)
    assert done.returncode == 3
    assert "infir2.toml" in done.stderr and "--force" in done.stderr
    assert path.read_text(encoding="utf-8") == "precious"
    assert run_cli("init", "--force", cwd=tmp_path).returncode == 0
    assert path.read_text(encoding="utf-8") != "precious"


def test_dry_run_prints_the_file_and_writes_nothing(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("init", "p", "--size", "7b", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert tomllib.loads(done.stdout)["model"] == {"size": "7b", "from": "Qwen/Qwen2.5-7B"}
    assert list(tmp_path.iterdir()) == []


def test_json_says_what_was_written(run_cli: Any, tmp_path: Path) -> None:
    said = json.loads(run_cli("init", "--json", cwd=tmp_path).stdout)
    assert said["written"] is True
    assert said["text"] == (tmp_path / said["path"]).read_text(encoding="utf-8")
    said = json.loads(run_cli("init", "--json", cwd=tmp_path).stdout)
    assert said["error"]["exit_code"] == 3


def test_a_wrong_size_names_the_nearest(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("init", "--size", "1.5", cwd=tmp_path)
    assert done.returncode == 2
    assert "Did you mean '1.5b'?" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_folder_is_refused(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = run_cli("init", "taken", cwd=tmp_path)
    assert done.returncode == 3 and "not a folder" in done.stderr and "taken" in done.stderr


def test_a_folder_that_cannot_be_made_is_refused(run_cli: Any) -> None:
    done = run_cli("init", "/proc/infir2")  # a place where not even root may make a folder
    assert done.returncode == 3 and "/proc/infir2" in done.stderr


MODEL = "--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --num-query-groups 4"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--global-batch-size 0 --min-lr -5", "--global-batch-size, --min-lr"),
        ("--data-path -1 text 1 code", "--data-path"),
        ("--lr 1e-4 --train-iters 100", ""),
    ],
)
def test_a_script_with_values_that_no_project_may_have(run_cli: Any, tmp_path: Path, flags: str, named: str) -> None:
    (tmp_path / "run.sh").write_text(f"python pretrain_gpt.py {MODEL} {flags}\n")
    done = run_cli("init", "p", "--from-script", "run.sh", cwd=tmp_path)
    if not named:
        assert done.returncode == 0 and (tmp_path / "p/infir2.toml").is_file(), done.stderr
        return
    assert done.returncode == 3 and f"run.sh: {named}" in done.stderr, done.stderr
    assert not (tmp_path / "p").exists()


def test_a_script_of_fine_tuning_with_such_values(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "sft.sh").write_text(f"python train.py {MODEL} --loss-type sft_loss --num-epoch 0\n")
    done = run_cli("init", "p", "--from-script", "sft.sh", cwd=tmp_path)
    assert done.returncode == 3 and "sft.sh: --num-epoch" in done.stderr, done.stderr
