"""One step of fine-tuning against transformers' own forward and TRL's SFTTrainer, in fp32 and without packing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import conversation, sft_config, write_chats
from transformers import AutoTokenizer, Qwen2ForCausalLM

from infir2_core.config.schema import RunConfig
from infir2_core.data.byte_files import byte_files
from infir2_core.data.chat_template import load_chat_tokenizer
from infir2_core.engines.native import NativeEngine
from infir2_core.engines.ranks import Ranks
from infir2_core.model.hf import save_hf
from infir2_core.precision.recipe import load_recipe
from infir2_core.train.chat_feed import ChatFeed

MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
COUNT = 6


def prepared(folder: Path) -> tuple[RunConfig, NativeEngine, Path]:
    """A run whose one step holds all samples, its engine in fp32, and the same weights as a Hugging Face folder."""
    data = write_chats(folder / "chats.jsonl", COUNT)
    config = sft_config(folder, data, recipe="fp32", eval_share=0.0, epochs=1, global_batch=COUNT)
    made = NativeEngine(config, load_recipe("fp32"), Ranks())
    made.model.initialise(0.1, seed=5)
    save_hf(made.model, folder / "hf", torch.float32)
    for name, text in (byte_files() | {"chat_template.jinja": MARKED}).items():
        (folder / "hf" / name).write_text(text, encoding="utf-8")
    return config, made, folder / "hf"


def test_the_first_step_is_that_of_transformers(tmp_path: Path) -> None:
    """Loss and gradients of the padded batch, labels -100 where the template's markers say that nothing is trained."""
    config, made, hf = prepared(tmp_path)
    model = Qwen2ForCausalLM.from_pretrained(hf, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(hf)
    records = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    chats = [
        tokenizer.apply_chat_template(r, return_dict=True, return_assistant_tokens_mask=True, tokenize=True)
        for r in records
    ]
    longest = max(len(chat["input_ids"]) for chat in chats)

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    ids = padded([c["input_ids"] for c in chats], 259)
    mask = padded([[1] * len(c["input_ids"]) for c in chats], 0)
    labels = padded([c["input_ids"] for c in chats], -100)
    labels[padded([c["assistant_masks"] for c in chats], 0) == 0] = -100
    assert int((labels[:, 1:] == 258).sum()) == sum(m["role"] == "assistant" for r in records for m in r)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters()))
    result = made.train_step(ChatFeed(config, Ranks()).step(0).batches, 1e-3).result()
    assert result.trained == int((labels[:, 1:] != -100).sum())
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)


TRL = """
import json, sys, torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

folder, hf, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
records = [{"messages": json.loads(line)["messages"]} for line in open(f"{folder}/chats.jsonl")]
settings = SFTConfig(
    output_dir=f"{folder}/trl", max_steps=1, per_device_train_batch_size=count, learning_rate=1e-3, packing=False,
    assistant_only_loss=True, max_length=None, logging_steps=1, report_to=[], use_cpu=True, bf16=False,
    gradient_checkpointing=False, save_strategy="no", max_grad_norm=0.0,
)
model = Qwen2ForCausalLM.from_pretrained(hf, dtype=torch.float32)
trainer = SFTTrainer(model, settings, train_dataset=Dataset.from_list(records),
                     processing_class=AutoTokenizer.from_pretrained(hf))
trainer.train()
print(json.dumps(next(entry for entry in trainer.state.log_history if "loss" in entry)))
"""


def test_the_first_step_loss_is_that_of_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    config, made, hf = prepared(tmp_path)
    command = [sys.executable, "-c", TRL, str(tmp_path), str(hf), str(COUNT)]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    ours = made.train_step(ChatFeed(config, Ranks()).step(0).batches, 1e-3).result()
    assert ours.loss == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-5)


def test_the_masks_of_the_two_templates_agree(tmp_path: Path) -> None:
    """The byte tokenizer's own template has no markers; what is trained is the same."""
    import random

    _, _, hf = prepared(tmp_path)
    marked, plain = load_chat_tokenizer(str(hf)), load_chat_tokenizer("byte")
    for seed in range(20):
        messages = conversation(random.Random(seed))
        for a, b in zip(marked.encode_chat(messages), plain.encode_chat(messages), strict=True):
            assert (a == b).all()
