"""Every figure in the README's table is one that benchmarks/figures.json records with hardware, versions and commit."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURES = json.loads((ROOT / "benchmarks" / "figures.json").read_text(encoding="utf-8"))["figures"]


def table() -> list[str]:
    """The figure cells of the README's table of measurements."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Measured", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [row.split("|")[2].strip() for row in rows]


def test_every_figure_of_the_readme_is_recorded() -> None:
    shown = {text for figure in FIGURES for text in figure["shown"]}
    cells = table()
    assert cells
    for cell in cells:
        parts = [part.strip() for part in cell.split(";")]
        assert set(parts) <= shown, (cell, shown)


def test_every_record_says_where_it_comes_from() -> None:
    for figure in FIGURES:
        assert all(figure[key] for key in ("what", "shown", "hardware", "versions", "commit", "command")), figure
        if "data" in figure:
            assert (ROOT / "benchmarks" / figure["data"]).is_file()


def test_the_recorded_speed_is_that_of_the_recorded_run() -> None:
    lines = (ROOT / "benchmarks" / "figures" / "h200-1.5b-infir2.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if '"kind": "step"' in line][5:]
    rates = sorted(step["tok_per_s"] for step in steps)
    middle = (rates[len(rates) // 2] + rates[(len(rates) - 1) // 2]) / 2
    shown = next(text for figure in FIGURES for text in figure["shown"] if re.fullmatch(r"[\d,]+ tokens/s", text))
    assert round(middle) == int(shown.split()[0].replace(",", ""))
    assert f"{steps[-1]['memory_gb']:.1f} GiB" in {text for figure in FIGURES for text in figure["shown"]}


STEPS = {
    "`1.5b`, 8,192 x 2 tokens, whole step": ("1.5b-8192x2", "step"),
    "`1.5b`, 32,768 tokens, whole step": ("1.5b-32768x1", "step"),
    "`7b`, 8,192 tokens, forward and backward": ("7b-8192x1-fwdbwd", "forward+backward"),
    "`7b`, 32,768 tokens, whole step": ("7b-32768x1", "step"),
}


def bench(name: str) -> dict[str, dict[str, Any]]:
    """Arm -> row of a recorded comparison."""
    data = json.loads((ROOT / "benchmarks" / "figures" / f"h200-{name}.json").read_text(encoding="utf-8"))
    return {row["name"]: row for row in data["rows"]}


def test_the_table_of_speeds_is_that_of_the_recorded_runs() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Speed", 1)[1].split("\n## ", 1)[0]
    shown: dict[str, dict[str, list[str]]] = {}
    label = ""
    for line in [line for line in section.splitlines() if line.startswith("|")][2:]:
        first, arm, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        label = first or label
        shown.setdefault(label, {})[arm.strip("`")] = cells
    assert set(shown) == set(STEPS)
    for label, (name, phase) in STEPS.items():
        rows = bench(name)
        assert set(shown[label]) == set(rows)
        for arm, row in rows.items():
            ratio = f"{row['ratio'][phase]:.2f}" if row["ratio"] else ""
            there = [] if row["failed"] else [f"{row['ms'][phase]:,.1f}", f"{row['tok_per_s']:,.0f}", ratio]
            expected = [*there, f"{row['peak_gb']:.1f}"] if there else ["does not fit", "", "", ""]
            assert shown[label][arm] == expected, arm
    after = bench("1.5b-8192x2-after200")
    assert all(f"`{arm}` {row['tok_per_s']:,.0f}" in section for arm, row in after.items())


def test_accepted_ratios_are_those_of_the_recorded_runs() -> None:
    accepted = json.loads((ROOT / "benchmarks" / "baselines" / "nvidia-h200.json").read_text(encoding="utf-8"))
    assert set(accepted) == {"1.5b-8192x2", "1.5b-8192x2-after200", "1.5b-32768x1", "7b-8192x1-fwdbwd"}
    for key, arms in accepted.items():
        rows = bench(key)
        assert set(arms) == set(rows) - {"bf16"}
        for arm, ratios in arms.items():
            kept = ("forward+backward", "step", "peak_gb")
            assert ratios == {name: rows[arm]["ratio"][name] for name in kept}


def test_fine_tuning_and_the_continued_study_are_as_recorded() -> None:
    figures = ROOT / "benchmarks" / "figures"
    shown = {text for figure in FIGURES for text in figure["shown"]}
    sft = json.loads((figures / "h200-1.5b-sft.json").read_text(encoding="utf-8"))
    apart = [a / b - 1 for a, b in zip(sft["infir2"]["losses"], sft["bf16"]["losses"], strict=True)]
    assert f"{max(apart, key=abs):+.3%}".replace("%", " %") in shown and max(map(abs, apart)) <= 0.005
    for arm in sft.values():
        # Logged before steps were charged their own time: what was logged for step n is the time of step n + 1.
        late = sum(arm["tokens_a_step"][34:]) / sum(arm["logged_step_ms"][33:]) * 1e3
        assert arm["tokens_per_second"] == pytest.approx(late)
        assert {f"{arm['tokens_per_second']:,.0f} tok/s", f"{arm['memory_gb']:.1f} GB"} <= shown
    study = json.loads((figures / "h200-1.5b-parity-continued.json").read_text(encoding="utf-8"))["last_46_steps"]
    for recipe in ("infir2", "infir2-lean"):
        difference = sum(study[recipe]) / sum(study["bf16"]) - 1
        assert f"{difference:+.2%}".replace("%", " %") in shown and abs(difference) <= 0.005


def relative(losses: dict[str, dict[str, list[float]]], recipe: str) -> list[float]:
    """Relative difference to bf16 of each seed's mean loss."""
    pairs = [(losses[recipe][seed], losses["bf16"][seed]) for seed in losses[recipe]]
    return [sum(arm) / sum(base) - 1 for arm, base in pairs]


@pytest.mark.parametrize("study", ["continued", "scratch"])
def test_the_recorded_parity_is_that_of_the_recorded_losses(study: str) -> None:
    path = ROOT / "benchmarks" / "figures" / f"h200-small-parity-{study}.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    ours, control = (relative(data["last_losses"], recipe) for recipe in ("infir2", "fp8-static"))
    error = statistics.stdev(ours) / len(ours) ** 0.5
    shown = {text for figure in FIGURES for text in figure["shown"]}
    assert f"{statistics.fmean(ours):+.3%} ± {error:.3%}".replace("%", " %") in shown
    assert len(ours) == 3 and data["evaluations"][-1] >= 2000 and control[0] >= 3 * 0.005
    if study == "continued":
        assert abs(statistics.fmean(ours)) <= 0.005
        assert f"{control[0]:+.1%}".replace("%", " %") in shown
