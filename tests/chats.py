"""Small chat files and runs of fine-tuning for tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from infir2_core.config.presets import load_preset
from infir2_core.config.resolve_sft import SftFlags, resolve_sft
from infir2_core.config.schema import RunConfig
from infir2_core.data.chat_measure import measure

WORDS = "the quick brown fox jumps over the lazy dog while seven wizards pack a box of five dozen jugs".split()


def conversation(chance: random.Random, most: int = 3) -> list[dict[str, str]]:
    """Turns of random words, of very different lengths."""

    def text() -> str:
        return " ".join(chance.choices(WORDS, k=chance.choice((1, 2, 3, 8, 20))))

    turns = chance.randint(1, most)
    return [{"role": role, "content": text()} for _ in range(turns) for role in ("user", "assistant")]


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """A JSONL file of `count` conversations with ids."""
    chance = random.Random(seed)
    lines = [json.dumps({"id": i, "messages": conversation(chance)}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def sft_config(folder: Path, data: Path, **settings: Any) -> RunConfig:
    """A run of stage 1 of the tiny model from random weights, over `data`."""
    base = {"global_batch": 8, "row_tokens": 512, "max_tokens": 512, "eval_share": 0.1, "answers": 0} | settings
    flags = SftFlags(stage="1", size="tiny", from_scratch=True, data=str(data), settings=base)
    return resolve_sft(flags, None, folder, measure).config


def tiny_sft() -> dict[str, Any]:
    """Settings of stage 1 of the tiny preset."""
    return load_preset("tiny").sft["1"].model_dump()
