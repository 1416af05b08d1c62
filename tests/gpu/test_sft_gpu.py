"""Packed microbatches of fine-tuning on a GPU: whatever their length, FP8 GEMMs run in kernels and not by reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chats import sft_config, write_chats

from infir2_core.engines.native import NativeEngine
from infir2_core.engines.ranks import Ranks
from infir2_core.precision.recipe import load_recipe
from infir2_core.train.chat_feed import ChatFeed

pytestmark = pytest.mark.gpu


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("recipe", ["bf16", "infir2"])
def test_steps_of_every_length_run_in_kernels_and_agree_with_the_cpu(tmp_path: Path, recipe: str) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 80)
    config = sft_config(tmp_path, data, recipe=recipe, global_batch=16, row_tokens=2048, init_std=0.05)
    feed = ChatFeed(config, Ranks())
    fast, slow = (NativeEngine(config, load_recipe(recipe), Ranks(device=device)) for device in ("cuda", "cpu"))
    for engine in (fast, slow):
        engine.model.initialise(0.05, 1)
    lengths = set()
    for start in range(0, 64, 16):
        share = feed.step(start)
        lengths |= {len(batch.tokens_T) for batch in share.batches}
        if recipe == "infir2" and hopper():
            rows = [row for batch in share.batches for row in fast.gemm_report(batch)]
            assert not any(row["by"] == "reference" for row in rows), rows
        a, b = (engine.train_step(share.batches, 1e-4).result() for engine in (fast, slow))
        assert a.trained == b.trained and a.loss == pytest.approx(b.loss, rel=5e-3)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=5e-2)
    assert len(lengths) > 1
