"""What two stages of fine-tuning did: `make demo-sft` ends with it.

    python benchmarks/demo_sft.py runs/demo-sft-1 runs/demo-sft-2

Prints the held-out losses of each run, then answers held-out prompts with the last one and counts how many answers end
by the turn-end token, and how many have the form of the data's. Exits 1 when a loss did not fall, or when not more than
95 % of the answers do either.
"""

from __future__ import annotations

import sys
from pathlib import Path

from infir2_core.convert.ready import choose_recipe, find_model, load_model
from infir2_core.data.chat_template import load_chat_tokenizer
from infir2_core.engines.ranks import Ranks
from infir2_core.model.generate import Generator, Sampling
from infir2_core.runs import read_run
from infir2_core.train.chat_feed import ChatFeed

PROMPTS, TOKENS, WANTED = 80, 256, 0.95


def main(folders: list[Path]) -> int:
    """0 when everything is as promised."""
    good = True
    for folder in folders:
        losses = [record["loss"] for record in read_run(folder).evals]
        good &= losses[-1] < losses[0]
        print(f"{folder.name}: held-out loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    config = read_run(folders[-1]).config
    assert config.chat is not None
    prompts = ChatFeed(config, Ranks()).prompts(PROMPTS)
    decode = load_chat_tokenizer(config.tokenizer).tokenizer.decode
    found = find_model(folders[-1], "RUN")
    model, found = load_model(found, choose_recipe(found, None), "cpu", lambda done, total: None)
    generator = Generator(model, [config.chat.turn_end], batch=32)
    for temperature in (0.0, 1.0):
        answers = generator.generate(prompts, Sampling(max_new_tokens=TOKENS, temperature=temperature))
        share = sum(answer.finish == "stop" for answer in answers) / len(answers)
        good &= share > WANTED
        how = "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"
        print(f"{how}: {share:.1%} of {len(answers)} answers to held-out prompts end by the turn-end token")
        texts = [decode([t for t in answer.tokens if t != config.chat.turn_end]).strip() for answer in answers]
        shaped = sum(text.endswith(".") and "\n" not in text for text in texts) / len(texts)
        good &= shaped > WANTED
        print(f"    {shaped:.1%} are one line that ends in a full stop, as those of the data are")
        for prompt, answer in list(zip(prompts, answers, strict=True))[:2]:
            print(f"    {decode(prompt)!r}\n    {decode(answer.tokens)!r}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
