"""Random inputs that are new in every run: a test that holds for all of them cannot have been fitted to one."""

from __future__ import annotations

import os
import secrets

import torch

SEED = int(os.environ.get("INFIR2_TEST_SEED") or secrets.randbelow(2**31))


def generator(number: int, device: str = "cpu") -> torch.Generator:
    """A generator of this run's inputs `number`; says, where a test fails, how to have the same again."""
    print(f"the same inputs again: INFIR2_TEST_SEED={SEED}")
    return torch.Generator(device).manual_seed(SEED + number)
