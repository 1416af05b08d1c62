"""Trains a byte-level BPE tokenizer on Python sources, for studies that need more than bytes.

    python benchmarks/bpe.py OUT FOLDER... [--vocabulary 32768] [--limit-mb 60]

OUT then holds tokenizer.json and tokenizer_config.json as Hugging Face's library reads them, with Qwen's end token, the
two marks of a turn, and a chat template.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from infir2_core.data.byte_files import BYTE_TEMPLATE

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = (  # Qwen's: contractions, words, single digits, punctuation, line ends, blanks
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(folders: list[str], limit: int) -> Iterator[str]:
    """Sources of the folders in a fixed order, `limit` bytes of them."""
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            if limit <= 0:
                return
            text = path.read_text(encoding="utf-8", errors="ignore")
            limit -= len(text)
            yield text


def main() -> None:
    """Trains and writes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--limit-mb", type=int, default=60)
    args = parser.parse_args()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts(args.folders, args.limit_mb << 20), trainer)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    made.save(str(out / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (out / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (out / "chat_template.jinja").write_text(BYTE_TEMPLATE, encoding="utf-8")
    print(f"{out}: {made.get_vocab_size():,} ids")


if __name__ == "__main__":
    main()
