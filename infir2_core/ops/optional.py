"""Libraries that make ops faster where they are installed."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from types import ModuleType


@cache
def optional(module: str, instead: str) -> ModuleType | None:
    """A module, or None where it, or what it is made for, is not installed.

    Args:
        module: full name.
        instead: what happens without it, for the warning when it is there and does not load: slower is better than not
            at all, but not in silence.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        warnings.warn(f"{module} does not load ({error}); {instead}", stacklevel=3)
        return None
