"""`infir2 data prepare` and `infir2 data show` as a user types them: output, JSON, exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_bpe import train_bpe


def test_standard_library_from_text_to_a_look_at_it(tmp_path: Path, run_cli: Any) -> None:
    made = run_cli("data", "prepare", "python-stdlib", "--out", "data/stdlib", "--limit-mb", "3", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "infir2 data show data/stdlib" in made.stdout and "Traceback" not in made.stderr
    assert "UserWarning" not in made.stderr
    again = run_cli("data", "prepare", "python-stdlib", "--out", "data/stdlib", "--limit-mb", "3", cwd=tmp_path)
    assert again.returncode == 0 and "already prepared" in again.stdout
    shown = run_cli("data", "show", "data/stdlib.bin", "--documents", "1", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "<|endoftext|>" in shown.stdout and "##" in shown.stdout and "document 1" not in shown.stdout
    facts = json.loads(run_cli("data", "show", "data/stdlib", "--json", cwd=tmp_path).stdout)
    assert facts["tokens"] == os.path.getsize(tmp_path / "data" / "stdlib.bin") / 2
    assert 3e6 <= facts["tokens"] < 5e6 and len(facts["samples"]) == 3


def test_json_result_with_a_trained_tokenizer(tmp_path: Path, run_cli: Any) -> None:
    train_bpe(tmp_path / "bpe")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "src" / "b.rst").write_text("the quick brown fox")
    arguments = ["src", "--out", "c", "--tokenizer", "bpe", "--ext", ".py,.rst", "--workers", "1", "--json"]
    result = json.loads(run_cli("data", "prepare", *arguments, cwd=tmp_path).stdout)
    assert result["documents"] == 2 and result["tokenizer"]["ref"] == "bpe" and not result["already"]
    shown = run_cli("data", "show", "c", cwd=tmp_path)
    assert "¦" in shown.stdout and "<|endoftext|>" in shown.stdout


def test_dry_run_writes_nothing(tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / "a.txt").write_text("hello")
    plain = run_cli("data", "prepare", "a.txt", "--out", "c", "--dry-run", cwd=tmp_path)
    assert plain.returncode == 0 and "would write" in plain.stdout
    planned = json.loads(run_cli("data", "prepare", "a.txt", "--out", "c", "--dry-run", "--json", cwd=tmp_path).stdout)
    assert planned["files"] == 1 and planned["bytes"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["prepare", "bad.jsonl", "--out", "c"], 3, "bad.jsonl, line 2"),
        (["prepare", "nothing.txt", "--out", "c"], 3, "no such file or folder"),
        (["prepare", "empty.txt", "--out", "c"], 3, "this file is empty"),
        (["prepare", "good.jsonl", "--out", "c", "--text-key", "body"], 3, "no key 'body'"),
        (["prepare", "good.jsonl", "--out", "c", "--tokenizer", "bite"], 3, "no such tokenizer"),
        (["prepare", "good.jsonl", "--out", "good.jsonl/c"], 3, "cannot read or write here"),
        (["prepare", "good.jsonl"], 2, "--out"),
        (["show", "c"], 3, "no such file: c.idx"),
    ],
)
def test_bad_input(tmp_path: Path, run_cli: Any, arguments: list[str], code: int, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": broken}\n')
    (tmp_path / "good.jsonl").write_text('{"text": "fine"}\n')
    (tmp_path / "empty.txt").write_text("")
    result = run_cli("data", *arguments, cwd=tmp_path)
    assert result.returncode == code
    assert message in result.stderr and "Traceback" not in result.stderr


def test_bad_input_as_json(tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / "bad.jsonl").write_text("nonsense\n")
    result = run_cli("data", "prepare", "bad.jsonl", "--out", "c", "--json", cwd=tmp_path)
    error = json.loads(result.stdout)["error"]
    assert (result.returncode, error["exit_code"], error["where"]) == (3, 3, "bad.jsonl, line 1")


def test_truncated_corpus(tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    assert run_cli("data", "prepare", "a.txt", "--out", "c", cwd=tmp_path).returncode == 0
    data = (tmp_path / "c.bin").read_bytes()
    (tmp_path / "c.bin").write_bytes(data[:-5])
    result = run_cli("data", "show", "c", cwd=tmp_path)
    assert result.returncode == 3 and "truncated: 5 bytes missing" in result.stderr
