"""Small Qwen2 folders written by transformers, with the side files that published models carry."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

EVEN = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1}
UNEVEN = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 3, "num_key_value_heads": 1}


def write_model(
    folder: Path,
    layers: int = 2,
    tied: bool = False,
    shard: str = "5GB",
    dtype: torch.dtype = torch.bfloat16,
    sizes: dict[str, int] | None = None,
    vocab: int = 131,
) -> Qwen2ForCausalLM:
    """A random model with biases that are not zero, saved by transformers; returns it."""
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=vocab, num_hidden_layers=layers, max_position_embeddings=64, tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, bos_token_id=1, eos_token_id=2,
        **(sizes or EVEN),
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# card\n")
    (folder / "extra").mkdir()
    (folder / "extra" / "notes.txt").write_text("deeper")
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    return model.eval()


def edit_config(folder: Path, **changes: object) -> None:
    """Changes keys of config.json; None removes one."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
