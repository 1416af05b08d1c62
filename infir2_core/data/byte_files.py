"""The byte tokenizer in Hugging Face's form, with a chat template, so that other tools read what infir2 trained."""

from __future__ import annotations

import json

from infir2_core.data.tokenizer import ByteTokenizer, byte_alphabet

# ChatML without a default system prompt.
BYTE_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_files() -> dict[str, str]:
    """File name -> text: a tokenizer.json that transformers reads, its config, chat template and generation config."""
    added = [
        {"id": 256 + i, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for i, name in enumerate(ByteTokenizer.names)
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "vocab": byte_alphabet(), "merges": [], "byte_fallback": False},
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": ByteTokenizer.names[0],
        "pad_token": ByteTokenizer.names[3],
        "clean_up_tokenization_spaces": False,
    }
    generation = {"eos_token_id": ByteTokenizer.eod, "pad_token_id": 259}
    files = {"tokenizer.json": content, "tokenizer_config.json": config, "generation_config.json": generation}
    written = {name: json.dumps(value, indent=1, ensure_ascii=False) + "\n" for name, value in files.items()}
    return written | {"chat_template.jinja": BYTE_TEMPLATE}
