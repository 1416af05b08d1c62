"""Run folders: what they say about a run, who holds them, how they are found, compared and drawn."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from typer.testing import CliRunner

from infir2_cli.commands.runs import app
from infir2_core.config.presets import load_preset
from infir2_core.errors import InputError, UsageError
from infir2_core.report.compare import compare, paired, settings_that_differ
from infir2_core.report.curves import draw, smooth, write_png
from infir2_core.report.page import write_page
from infir2_core.runs import (
    RunLock,
    attempts,
    default_runs_dir,
    holder_of,
    latest_checkpoint,
    list_runs,
    read_config,
    read_run,
    resolve_run,
    start_attempt,
    summarise,
    write_exit,
)
from infir2_core.train.checkpoint import CheckpointStore


def make_run(runs: Path, name: str, steps: int = 20, planned: int = 20, shift: float = 0.0, **cpt: Any) -> Path:
    """A run folder with the tiny preset and made-up metrics: loss 5 - step / 10 + shift, an eval every 5."""
    preset = load_preset("tiny")
    settings = preset.cpt.model_dump() | {"steps": planned, "warmup_steps": 2, "decay_steps": 4, "recipe": "bf16"} | cpt
    config = {
        "format": 1,
        "name": name,
        "runs": str(runs),
        "size": "tiny",
        "model": preset.model.model_dump(),
        "source": {"kind": "scratch"},
        "data": [{"prefix": "data/py", "weight": 1.0}],
        "cpt": settings,
    }
    path = runs / name
    path.mkdir(parents=True)
    (path / "config.toml").write_text(tomli_w.dumps(config))
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        lines.append(
            {"kind": "step", "step": step, "loss": 5 - step / 10 + shift, "lr": 1e-3, "tokens": step * 64}
            | {"tok_per_s": 100.0 + step, "memory_gb": 1.0 + step / 100, "skipped": step == 7}
        )
        if step % 5 == 0:
            lines.append({"kind": "eval", "step": step, "loss": 5.5 - step / 10 + shift, "tokens": step * 64})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def invoke(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


# Summaries and status


def test_summary_of_a_run(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a", steps=11)
    summary = summarise(path)
    assert (summary.name, summary.stage, summary.size, summary.recipe) == ("a", "cpt", "tiny", "bf16")
    assert (summary.steps_done, summary.steps_planned, summary.tokens, summary.skipped) == (11, 20, 704, 1)
    assert summary.loss == pytest.approx(3.9) and summary.eval_loss == pytest.approx(4.5)
    assert summary.tok_per_s == statistics.median(range(101, 112)) and summary.memory_gb == pytest.approx(1.11)


def test_values_that_were_not_finite_do_not_count(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a", steps=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(
            '{"kind": "step", "step": 4, "loss": null, "tok_per_s": null, "nonfinite": ["loss"], "skipped": true}\n'
        )
    summary = summarise(path)
    assert summary.steps_done == 4 and summary.loss == pytest.approx(4.7) and summary.tok_per_s == 102
    assert summary.skipped == 1


@pytest.mark.parametrize(
    ("steps", "ends", "status"),
    [
        (0, None, "new"),
        (20, None, "finished"),
        (8, None, "crashed"),  # steps were made, nobody holds the folder, no end was noted
        (0, [{}], "crashed"),
        (8, [{0: 0}], "finished"),
        (8, [{0: 75, 1: 75}], "stopped"),
        (8, [{0: 75, 1: 1}], "crashed"),  # one rank failed while the others stopped
        (8, [{0: 5}], "crashed"),
        (8, [{0: 1}, {0: 75}], "stopped"),  # the last start counts
    ],
)
def test_status(tmp_path: Path, steps: int, ends: list[dict[int, int]] | None, status: str) -> None:
    path = make_run(tmp_path, "a", steps=steps)
    for codes in ends or []:
        attempt = start_attempt(path)
        for rank, code in codes.items():
            write_exit(attempt, rank, code, "out of luck" if code not in (0, 75) else "")
    assert summarise(path).status == status
    assert [a.number for a in attempts(path)] == list(range(1, len(ends or []) + 1))
    if any(code not in (0, 75) for code in (ends or [{}])[-1].values()):
        assert summarise(path).problem == "out of luck"
    with RunLock(path):
        assert summarise(path).status == "running"


def test_the_tenth_attempt_comes_after_the_ninth(tmp_path: Path) -> None:
    names = [start_attempt(tmp_path).name for _ in range(11)]
    assert names == [f"attempt-{n}" for n in range(1, 12)]
    assert [a.number for a in attempts(tmp_path)] == list(range(1, 12))


def test_a_damaged_run_is_listed_as_unreadable_and_hides_no_other(tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    for name, text in (("syntax", "name = "), ("key", 'format = 1\ncolour = "red"'), ("newer", "format = 9")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(text)
    torn = make_run(tmp_path, "torn")
    (torn / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\nnonsense\n{"kind": "step", "step": 2}\n')
    (tmp_path / "not-a-run").mkdir()
    found = {summary.name: summary for summary in list_runs(tmp_path)}
    assert sorted(found) == ["good", "key", "newer", "syntax", "torn"]
    assert {name: s.status for name, s in found.items() if name != "good"} == dict.fromkeys(
        ("key", "newer", "syntax", "torn"), "unreadable"
    )
    assert "metrics.jsonl:2" in found["torn"].problem and "config.toml:1" in found["syntax"].problem
    assert "format is 9" in found["newer"].problem and "colour" in found["key"].problem


def test_config_errors_carry_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder") as caught:
        read_config(tmp_path)
    assert caught.value.exit_code == 3 and str(tmp_path) in caught.value.where
    path = make_run(tmp_path, "a")
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("seq_len = 256", "seq_len = -1"))
    with pytest.raises(InputError, match="cpt.seq_len") as caught:
        read_config(path)
    assert re.search(r"config\.toml:\d+", caught.value.where)


# Lock


def test_a_second_process_is_refused_and_told_the_pid(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from infir2_core.runs import RunLock\n"
        "with RunLock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    assert f"pid {process.pid} " in (holder_of(tmp_path) or "")
    with pytest.raises(InputError, match=f"pid {process.pid} on") as caught, RunLock(tmp_path):
        pytest.fail("two processes hold one run")
    assert caught.value.exit_code == 3 and "stop" in caught.value.hint
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert holder_of(tmp_path) is None  # a kill needs no cleaning up
    with RunLock(tmp_path):
        assert f"pid {os.getpid()} " in (holder_of(tmp_path) or "")
    assert holder_of(tmp_path) is None


def test_a_forked_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; from infir2_core.runs import RunLock\n"
        "with RunLock(Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if child == 0: time.sleep(60)\n"
        "    print(child, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        time.sleep(0.1)  # the child closes its copy right after the fork
        assert holder_of(tmp_path) is not None
        process.kill()
        process.wait()
        assert holder_of(tmp_path) is None
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_looking_at_the_lock_does_not_make_a_start_fail(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from infir2_core.runs import holder_of\n"
        "print('go', flush=True); end = time.time() + 1\n"
        "while time.time() < end: holder_of(Path(sys.argv[1])); time.sleep(0.005)"
    )
    (tmp_path / "lock").touch()
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "go\n"
    for _ in range(20):
        with RunLock(tmp_path):
            pass
    process.communicate()


# Finding runs


def test_resolve_by_path_name_and_unique_beginning(tmp_path: Path) -> None:
    a, ab, c = (make_run(tmp_path, name, 0) for name in ("cpt-a", "cpt-ab", "sft-c"))
    assert resolve_run(str(c), Path("nowhere")) == c
    assert resolve_run("cpt-a", tmp_path) == a  # a whole name wins over a longer one that begins with it
    assert resolve_run("cpt-ab", tmp_path) == ab and resolve_run("s", tmp_path) == c
    with pytest.raises(InputError, match="could be any of 2 runs") as caught:
        resolve_run("cpt", tmp_path)
    assert "cpt-a, cpt-ab" in caught.value.hint
    with pytest.raises(InputError, match="no run 'sftc'") as caught:
        resolve_run("sftc", tmp_path)
    assert "Did you mean 'sft-c'?" in caught.value.hint
    with pytest.raises(InputError, match="no run at all"):
        resolve_run("x", tmp_path / "empty")


def test_latest_checkpoint_is_the_newest_complete_one(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a", 0)
    assert latest_checkpoint(path) is None
    store = CheckpointStore(path / "checkpoints")
    for step in (1, 2, 3):
        store.save(step, {"w": torch.ones(3)}, {}, blocking=True)
    os.truncate(path / "checkpoints" / "step-00000003" / "rank-00000.safetensors", 10)
    assert latest_checkpoint(path) == path / "checkpoints" / "step-00000002"


def test_default_runs_dir_is_the_projects(tmp_path: Path) -> None:
    assert default_runs_dir(tmp_path) == tmp_path / "runs"
    (tmp_path / "infir2.toml").write_text('format = 1\n[project]\nruns = "elsewhere"\n')
    (tmp_path / "below").mkdir()
    assert default_runs_dir(tmp_path / "below") == tmp_path / "elsewhere"


# Comparing and drawing


def test_paired_statistics_against_hand_computed_ones() -> None:
    found = paired([(1, 2.0, 2.1), (2, 4.0, 4.3)])
    assert found is not None and found.count == 2
    assert found.mean == pytest.approx(0.2) and found.relative == pytest.approx(100 * 0.2 / 3)
    assert found.stderr == pytest.approx(100 * 0.1 / 3)  # deviations of 0.1 around 0.2: sd 0.1414, over sqrt(2) 0.1
    alone = paired([(1, 2.0, 1.0)])
    assert alone is not None and alone.relative == -50 and alone.stderr is None
    assert paired([]) is None


def test_compare_pairs_equal_steps_only(tmp_path: Path) -> None:
    base = read_run(make_run(tmp_path, "base", steps=20))
    other = read_run(make_run(tmp_path, "other", steps=50, planned=50, shift=0.02, recipe="infir2", lr=1e-3))
    result = compare([base, other])
    against = result.against[0]
    assert against.every is not None and against.every.count == 4  # 5, 10, 15, 20
    assert against.every.mean == pytest.approx(0.02)
    assert against.last == against.every
    assert [row["step"] for row in result.losses] == [5, 10, 15, 20]
    assert result.losses[0]["eval"] == {"base": pytest.approx(5.0), "other": pytest.approx(5.02)}
    assert against.tok_per_s_ratio == pytest.approx(125.5 / 110.5) and against.memory_ratio == pytest.approx(1.5 / 1.2)
    assert against.settings == {"cpt.recipe": ["bf16", "infir2"], "cpt.steps": [20, 50], "cpt.lr": [2e-3, 1e-3]}
    assert settings_that_differ(base, base) == {}
    with pytest.raises(UsageError, match="at least two"):
        compare([base])
    with pytest.raises(UsageError, match="given twice"):
        compare([base, read_run(tmp_path / "base")])


def test_smoothing_is_a_centred_mean_that_skips_gaps() -> None:
    assert smooth([1.0, 2.0, 6.0, math.nan, 4.0], 3) == [1.5, 3.0, 4.0, 5.0, 4.0]
    assert smooth([3.0, math.nan], 1)[0] == 3.0 and math.isnan(smooth([3.0, math.nan], 1)[1])


def test_the_figure_shows_what_was_measured(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path, name, shift=shift)) for name, shift in (("a", 0.0), ("b", 0.5))]
    for record in runs[1].steps:
        del record["memory_gb"]
    figure = draw(runs)
    panels = {panel.get_title(loc="left"): panel for panel in figure.axes}
    loss = next(panel for title, panel in panels.items() if title.startswith("Loss"))
    drawn = {str(line.get_label()): list(line.get_ydata()) for line in loss.lines}
    assert drawn["a (bf16)"] == pytest.approx([5 - step / 10 for step in range(1, 21)])
    assert drawn["held-out, last 4.0000"] == pytest.approx([record["loss"] for record in runs[1].evals])
    against = next(panel for title, panel in panels.items() if title.startswith("Held-out loss against"))
    expected = [100 * 0.5 / (5.5 - step / 10) for step in (5, 10, 15, 20)]
    assert list(against.lines[-1].get_ydata()) == pytest.approx(expected)
    memory = panels["Memory, peak"]
    assert not any(math.isnan(y) for y in memory.lines[0].get_ydata())
    assert all(math.isnan(y) for y in memory.lines[1].get_ydata())
    assert all(panel.get_xlabel() == "step" for panel in figure.axes)
    tokens = draw(runs, "tokens").axes[0]
    assert list(tokens.lines[-1].get_xdata()) == [320, 640, 960, 1280] and tokens.get_xlabel() == "tokens"


def test_pictures_and_pages_are_written_and_need_nothing_from_outside(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a<b")
    CheckpointStore(path / "checkpoints").save(20, {"w": torch.ones(3)}, {}, blocking=True)
    write_exit(start_attempt(path), 0, 5, "loss was not finite & <more>")
    write_png([read_run(path)], tmp_path / "new" / "curves.png")
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    text = write_page(path).read_text()
    assert "a&lt;b" in text and "a<b" not in text and "not finite &amp; &lt;more&gt;" in text
    assert "step-00000020" in text and "exit code 5" in text and "cpt.seq_len" in text
    assert not re.search(r"""(src|href)=["'](?!data:)""", text) and "http" not in text and "<script" not in text
    with pytest.raises(InputError, match="nothing to draw"):
        write_png([read_run(make_run(tmp_path, "empty", 0))], tmp_path / "x.png")
    assert write_page(tmp_path / "empty").exists()


# The command


def test_runs_list_show_and_compare_in_json(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", shift=0.1)
    code, out, _ = invoke("list", "--runs", tmp_path, "--json")
    assert code == 0 and sorted(run["name"] for run in json.loads(out)) == ["a", "b"]
    code, out, _ = invoke("show", "a", "--runs", tmp_path, "--json", "--html")
    shown = json.loads(out)
    assert code == 0 and shown["settings"]["cpt.steps"] == 20 and Path(shown["report"]).is_file()
    code, out, _ = invoke("compare", "a", "b", "--runs", tmp_path, "--json", "--png", tmp_path / "c.png")
    compared = json.loads(out)
    assert code == 0 and compared["against"][0]["every"]["mean"] == pytest.approx(0.1)
    assert (tmp_path / "c.png").is_file()


def test_runs_for_people(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", shift=0.1, recipe="infir2")
    (tmp_path / "a" / "logs").mkdir()
    code, out, _ = invoke("list", "--runs", tmp_path)
    assert code == 0 and re.search(r"a +finished +bf16 +20/20 +3\.0000 +3\.5000 +1,280 +110", out)
    code, out, _ = invoke("show", "b", "--runs", tmp_path)
    assert code == 0 and "cpt.recipe" in out and "Newest complete checkpoint: none" in out
    code, out, _ = invoke("compare", "a", "b", "--runs", tmp_path)
    assert code == 0 and "4 evaluations: +0.10000 nats" in out
    assert re.search(r"cpt\.recipe +bf16 +infir2", out) and "tokens/s ratio 1.000" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["list", "--runs", "missing"], 3, "no such folder of runs"),
        (["show", "c", "--runs", "."], 3, "no run 'c'"),
        (["compare", "a", "--runs", "."], 2, "at least two runs"),
        (["compare", "a", "a", "--runs", "."], 2, "given twice"),
        (["compare", "a", "b", "--runs", ".", "--png", "a/config.toml/x.png"], 3, "picture cannot be written"),
    ],
)
def test_bad_input_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    make_run(tmp_path, "a")
    make_run(tmp_path, "b")
    monkeypatch.chdir(tmp_path)
    found, _, err = invoke(*arguments)
    assert (found, message in err) == (code, True), err
    found, out, _ = invoke(*arguments, "--json")
    assert found == json.loads(out)["error"]["exit_code"] == code


def test_an_empty_folder_of_runs_says_how_to_start(tmp_path: Path) -> None:
    code, out, _ = invoke("list", "--runs", tmp_path)
    assert code == 0 and "infir2 cpt --size tiny" in out


def test_listing_runs_needs_no_torch(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    script = (
        "import sys; from infir2_cli.commands.runs import app\n"
        "try: app(['list', '--runs', sys.argv[1]])\n"
        "finally: assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
