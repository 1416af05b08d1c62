"""Every figure in the README's table is one that benchmarks/figures.json records with hardware, versions and commit."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

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
