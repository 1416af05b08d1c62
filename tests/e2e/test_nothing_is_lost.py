"""Kill -9 at any moment, even inside a save, and the same command ends with the same bits as a run that was left
alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import metrics
from killing import attempt, command, kill_until_done

from infir2_core.train.checkpoint import CheckpointStore


def assert_same_end(straight: Path, killed: Path) -> None:
    """Newest checkpoints and logs of two runs are equal bit for bit."""
    ends = []
    for run in (straight, killed):
        store = CheckpointStore(run / "checkpoints")
        newest, damaged = store.newest()
        assert newest is not None and not damaged
        ends.append(store.load(newest))
    assert ends[0].step == ends[1].step and ends[0].state == ends[1].state
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor.view(torch.uint8), ends[1].tensors[name].view(torch.uint8)), name
    for kind in ("step", "eval"):
        assert metrics(straight, kind) == metrics(killed, kind)


# fp8-delayed is the recipe with a state of its own (amax histories); infir2 is the one that matters most.
@pytest.mark.parametrize("recipe,kills", [("infir2", 4), ("fp8-delayed", 2)])
def test_killed_runs_end_with_the_same_bits(corpus: Path, tmp_path: Path, recipe: str, kills: int) -> None:
    steps = 40
    assert attempt(command(corpus, tmp_path, "straight", steps, recipe)) == 0
    killed = command(corpus, tmp_path, "killed", steps, recipe)
    inside_a_save = 0
    for point in ("save:after-tensors", "save:before-rename"):
        # The tally below chooses at random; these two make sure that a save is among the victims each time.
        inside_a_save += attempt(killed, f"kill:{point}") == -9
    assert inside_a_save == 2
    tally = kill_until_done(killed, tmp_path / "killed", steps, kills, seed=7)
    assert not tally.lost and sum(tally.kills.values()) == kills
    assert_same_end(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.slow
def test_soak(corpus: Path, tmp_path: Path) -> None:
    steps, kills = 60, 200
    assert attempt(command(corpus, tmp_path, "straight", steps, "infir2")) == 0
    tally = kill_until_done(
        command(corpus, tmp_path, "killed", steps, "infir2"), tmp_path / "killed", steps, kills, seed=11
    )
    print(
        f"\nsoak: n = {sum(tally.kills.values())} kills, by place {dict(tally.kills)}, lost {tally.lost or 'nothing'}"
    )
    assert not tally.lost
    assert_same_end(tmp_path / "straight", tmp_path / "killed")
