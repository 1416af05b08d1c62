"""`infir2 presets`, as typed."""

from __future__ import annotations

import json
from typing import Any

import pytest

SIZES = ["tiny", "small", "0.5b", "1.5b", "3b", "7b"]


def test_list(run_cli: Any) -> None:
    done = run_cli("presets", "list")
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:3] for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0] in SIZES]
    assert [row[0] for row in rows] == SIZES
    assert rows[-1][1:] == ["7.62", "B"]
    data = json.loads(run_cli("presets", "list", "--json").stdout)
    assert [preset["size"] for preset in data] == SIZES


@pytest.mark.parametrize("size", SIZES)
def test_show(run_cli: Any, size: str) -> None:
    from infir2_core.config.presets import load_preset

    preset = load_preset(size)
    data = json.loads(run_cli("presets", "show", size, "--json").stdout)
    assert data["cpt"] == preset.cpt.model_dump() and data["model"] == preset.model.model_dump()
    for stage in ("1", "2"):
        assert (
            data["sft"][stage] == preset.sft[stage].model_dump() and data["rl"][stage] == preset.rl[stage].model_dump()
        )
    assert data["parameters"] == preset.model.parameters


def test_show_for_people_tells_shape_settings_and_tokens(run_cli: Any) -> None:
    done = run_cli("presets", "show", "7b")
    assert done.returncode == 0, done.stderr
    assert "167.8 B (167,772,160,000)" in done.stdout and "7.62 B (7,615,616,512)" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    for row in (["vocab", "152064"], ["tied", "false"], ["lr", "0.0001"], ["split", "90,5,5"], ["max_skips", "10"]):
        assert row in lines
    for row in (["key", "[rl.1]", "[rl.2]"], ["max_response_tokens", "8192", "16384"], ["temperature", "1", "1.1"]):
        assert row in lines


def test_a_misspelt_size(run_cli: Any) -> None:
    done = run_cli("presets", "show", "15b")
    assert done.returncode == 3
    assert "no preset for size '15b'" in done.stderr and "Did you mean '1.5b'?" in done.stderr
    error = json.loads(run_cli("presets", "show", "15b", "--json").stdout)["error"]
    assert error["exit_code"] == 3
