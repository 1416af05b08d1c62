"""FlashAttention's compiled kernels are kept where they can be, and the user's own setting stands."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from infir2_core.ops.hopper.kept import keep_flash_attention, kept

SWITCH, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (SWITCH, FOLDER):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_kernels_are_kept_below_our_own_folder() -> None:
    keep_flash_attention()
    assert os.environ[SWITCH] == "1" and Path(os.environ[FOLDER]) == kept() / "flash-attention"
    assert list((kept() / "flash-attention").iterdir()) == []


def test_the_users_setting_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    keep_flash_attention()
    assert os.environ[SWITCH] == "0" and FOLDER not in os.environ and not kept().exists()


def test_nothing_is_kept_in_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    keep_flash_attention()
    assert SWITCH not in os.environ and FOLDER not in os.environ


def test_nothing_is_kept_on_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    keep_flash_attention()
    assert SWITCH not in os.environ
