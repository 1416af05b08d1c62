"""Where compiled kernels are kept from process to process, ours and FlashAttention's."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

_SWITCH, _FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def kept() -> Path:
    """~/.cache/infir2, below XDG_CACHE_HOME where that is set; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infir2"


def keep_flash_attention() -> None:
    """Makes FlashAttention keep its compiled kernels, which it does not by itself; to be called before its import.

    Without effect where the user has set its switch, and where its folder cannot be written or locked: it would fail
    there, and compiling anew costs only time.
    """
    if _SWITCH in os.environ:
        return
    folder = kept() / "flash-attention"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return
    os.environ[_SWITCH] = "1"
    os.environ.setdefault(_FOLDER, str(folder))
