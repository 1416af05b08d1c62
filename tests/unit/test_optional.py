"""Libraries that may be missing, and may be there and broken."""

import sys
import warnings
from pathlib import Path

import pytest

from infir2_core.ops.optional import optional


def test_missing_broken_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "broken_library.py").write_text("raise OSError('no CUDA here')")
    (tmp_path / "lacking_library.py").write_text("import what_it_is_made_for")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert optional("no_such_library", "-") is None and optional("lacking_library", "-") is None
        assert optional("json", "-") is sys.modules["json"]
    with pytest.warns(UserWarning, match="no CUDA here.*all runs slower"):
        assert optional("broken_library", "all runs slower") is None
