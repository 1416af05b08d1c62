"""What the model answers to fixed prompts, greedily, at each evaluation of fine-tuning: RUN/samples.jsonl.

So that a person can watch the format being learnt. Only rank 0 generates; nothing of the training is changed by it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.schema import RunConfig
from ..data.chat_measure import prompt_ids
from ..data.chat_template import load_chat_tokenizer
from ..model.decoder import Decoder
from ..model.generate import Generator, Sampling
from .chat_feed import ChatFeed
from .metrics import SAMPLES, MetricsLog


class Answers:
    """Answers fixed prompts and appends them to the run folder's samples.jsonl.

    Args:
        config: a run of fine-tuning.
        feed: gives prompts where the settings name none.
        model: as it is at each call of `write`.
        folder: the run folder.
        resume_step: as `MetricsLog` takes it.
    """

    def __init__(
        self, config: RunConfig, feed: ChatFeed, model: Decoder, folder: Path, resume_step: int | None
    ) -> None:
        assert config.sft is not None and config.chat is not None
        self.tokenizer = load_chat_tokenizer(config.tokenizer)
        self.prompts = prompt_ids(self.tokenizer, config.sft, config.model)
        if not config.sft.prompts:
            room = config.model.max_positions - config.sft.answer_tokens
            self.prompts = [ids for ids in feed.prompts(config.sft.answers) if len(ids) <= room]
        self.generator = Generator(model, [config.chat.turn_end])
        self.sampling = Sampling(max_new_tokens=config.sft.answer_tokens)
        self.log = MetricsLog(folder, resume_step, tensorboard=False, file=SAMPLES)

    def write(self, step: int) -> list[dict[str, Any]]:
        """Answers all prompts; the lines that were written."""
        decode = self.tokenizer.tokenizer.decode
        made = []
        for prompt, answer in zip(self.prompts, self.generator.generate(self.prompts, self.sampling), strict=True):
            ended = answer.finish == "stop"
            text = decode(answer.tokens[: len(answer.tokens) - ended])
            record = {"kind": "sample", "step": step, "prompt": decode(prompt), "completion": text}
            made.append(record | {"tokens": len(answer.tokens), "finish": answer.finish})
            self.log.append(made[-1])
        return made

    def close(self) -> None:
        """Closes the file."""
        self.log.close()
