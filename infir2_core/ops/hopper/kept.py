"""Where compiled kernels are kept from process to process, ours and FlashAttention's."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

_SWITCH, _FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def kept() -> Path | None:
    """~/.cache/infir2, below XDG_CACHE_HOME where that is set; it may not exist. None for a user without a home."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "infir2"
    try:
        return Path.home() / ".cache" / "infir2"
    except RuntimeError:  # a container may run as a number that no user has; code in /tmp may be anyone's
        return None


def keep_flash_attention() -> None:
    """Makes FlashAttention keep its compiled kernels, which it does not by itself; to be called before its import.

    Without effect where the user has set its switch, and where its folder cannot be written or locked: it would fail
    there, and compiling anew costs only time.
    """
    own = kept()
    chosen = os.environ.get(_FOLDER) or (own and own / "flash-attention")
    if _SWITCH in os.environ or not chosen:
        return
    folder = Path(chosen)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return
    os.environ[_SWITCH], os.environ[_FOLDER] = "1", str(folder)


def forgive(store: type) -> None:
    """Makes FlashAttention's store of compiled kernels (`JITPersistentCache`) compile anew what it cannot read, and go
    on where it cannot write: a full disk, another user's files, a lock that is held too long.
    """

    def without(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def tried(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except (OSError, RuntimeError):
                return False

        return tried

    for name in ("_try_load_from_storage", "_try_export_to_storage"):
        setattr(store, name, without(getattr(store, name)))
