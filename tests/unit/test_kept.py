"""FlashAttention's compiled kernels are kept where they can be, and the user's own setting stands."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from infir2_core.ops.hopper.kept import forgive, keep_flash_attention, kept

SWITCH, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (SWITCH, FOLDER):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_kernels_are_kept_below_our_own_folder(tmp_path: Path) -> None:
    keep_flash_attention()
    folder = tmp_path / "cache" / "infir2" / "flash-attention"
    assert os.environ[SWITCH] == "1" and os.environ[FOLDER] == str(folder)
    assert list(folder.iterdir()) == []


def test_the_users_setting_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SWITCH, "0")
    keep_flash_attention()
    assert os.environ[SWITCH] == "0" and FOLDER not in os.environ and not (tmp_path / "cache").exists()


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


def test_the_users_own_folder_is_the_one_that_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    keep_flash_attention()
    assert SWITCH not in os.environ and not (tmp_path / "cache").exists()
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    keep_flash_attention()
    assert os.environ[SWITCH] == "1" and os.environ[FOLDER] == str(tmp_path / "mine")


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    keep_flash_attention()
    assert kept() is None and SWITCH not in os.environ


@pytest.mark.parametrize("error", [PermissionError(13, "no"), OSError(28, "full"), RuntimeError("locked"), None])
def test_a_store_that_fails_is_done_without(error: Exception | None) -> None:
    class Store:
        def _try_load_from_storage(self, key: str) -> bool:
            if error:
                raise error
            return key == "kept"

        def _try_export_to_storage(self, key: str, function: object) -> None:
            if error:
                raise error

    forgive(Store)
    assert Store()._try_load_from_storage("kept") is (error is None)
    Store()._try_export_to_storage("kept", None)
