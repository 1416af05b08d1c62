"""The last steps of a folder in the making: whatever ends them, the same command finishes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from infir2_core.convert import staging
from infir2_core.convert.staging import Staging
from infir2_core.errors import InputError

PLAN = {"what": "a test"}


class Killed(BaseException):
    """Ends the process at some step, as far as the files show it."""


def make(out: Path, appears: str = "") -> list[str]:
    """One file, published; returns the files that had to be made."""
    made = []
    with Staging(out, PLAN, 4) as stage:
        if stage.finished("weights") is None:
            made.append("weights")
            stage.aside("weights").write_bytes(b"data")
            stage.finish("weights", {})
        if appears == "file":
            out.write_text("theirs")
        elif appears:
            out.mkdir()
            (out / "theirs").write_text("theirs")
        stage.publish()
    return made


def whole(out: Path) -> None:
    assert [path.name for path in out.iterdir()] == ["weights"] and (out / "weights").read_bytes() == b"data"
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("late", [False, True])
def test_a_name_that_is_taken_meanwhile_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, late: bool
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        if late:  # between the look and the rename
            exists = Path.exists
            patch.setattr(Path, "exists", lambda self: self != out and exists(self))
        with pytest.raises(InputError, match="is kept in") as caught:
            make(out, kind)
    assert "type the same command again" in caught.value.hint
    shutil.move(out, tmp_path / "elsewhere")
    assert make(out) == []  # nothing is made twice
    shutil.rmtree(tmp_path / "elsewhere") if kind == "folder" else (tmp_path / "elsewhere").unlink()
    whole(out)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_each_of_the_last_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, after: bool
) -> None:
    out, rename, seen = tmp_path / "out", Path.rename, 0

    def killed(self: Path, target: Path) -> Path:
        nonlocal seen
        last = self.name in (staging.JOURNAL, "out.partial")
        seen += last
        if last and seen == number + 1:
            if after:
                rename(self, target)
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            make(out)
    if number and after:  # it has its name: whole, and the next one of that name is not hindered
        assert [path.name for path in out.iterdir()] == ["weights"]
        shutil.rmtree(out)
        assert make(out) == ["weights"]
    else:
        assert make(out) == []
    whole(out)


def test_two_at_a_time(tmp_path: Path) -> None:
    with Staging(tmp_path / "out", PLAN, 4) as stage:
        for _ in range(2):  # also during the last step
            with pytest.raises(InputError, match="another process"), Staging(tmp_path / "out", PLAN, 4):
                pass
            if stage.path.joinpath(staging.JOURNAL).exists():
                stage.path.joinpath(staging.JOURNAL).rename(tmp_path / "out.partial.infir2")


def test_a_bad_source_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError), Staging(tmp_path / "out", PLAN, 4):
        raise InputError("bad")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words", "repeat"),
    [
        ({"files": {"a": 2}}, "the source has changed", False),
        ({"version": "2"}, "another version", False),
        ({"rule": "pow2"}, "other settings", True),
        ({"files": {"a": 2}, "source": "elsewhere"}, "other settings", True),
    ],
)
def test_what_an_unfinished_output_hints_at(
    tmp_path: Path, change: dict[str, object], words: str, repeat: bool
) -> None:
    plan = {"what": "a test", "source": "here", "files": {"a": 1}, "version": "1", "rule": "fp32"}
    with pytest.raises(KeyboardInterrupt) as stop, Staging(tmp_path / "out", plan, 4):
        raise KeyboardInterrupt
    assert stop.value.__notes__ == ["the same command goes on where this one ended"]
    with pytest.raises(InputError, match=words) as caught, Staging(tmp_path / "out", plan | change, 4):
        pass
    assert ("repeat that command" in caught.value.hint) == repeat and "rm -r" in caught.value.hint
    assert (tmp_path / "out.partial").is_dir()
    with Staging(tmp_path / "out", plan, 4) as stage:
        stage.publish()
