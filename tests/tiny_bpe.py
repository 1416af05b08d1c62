"""A small byte-level BPE tokenizer, trained in milliseconds, for tests that need more than the byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

TEXT = "def naïve(x): return '日本語' + x  # the quick brown fox\n" * 30
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def train_bpe(
    folder: Path,
    vocabulary: int = 400,
    special: tuple[str, ...] = SPECIAL,
    text: str = TEXT,
    words: bool = True,
    **config: object,
) -> Path:
    """A byte-level BPE tokenizer in Hugging Face's layout, like Qwen's but tiny.

    Without `words` tokens may hold line ends and several words.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **config})
    )
    return folder
