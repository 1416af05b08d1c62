"""`infir2 generate`: what a model says, as it comes. Parse, plan, run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..output import DebugFlag, JsonFlag, console, emit, guarded, say

Opt = typer.Option


@guarded
def generate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face folder, hub id, run or checkpoint; default: the run written to last.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[list[str] | None, Opt(help="Text to answer or continue; repeat for several.")] = None,
    file: Annotated[Path | None, Opt(help="Prompts: one a line, or .jsonl with 'prompt' or 'messages'.")] = None,
    chat: Annotated[
        bool | None, Opt("--chat/--raw", help="Wrap prompts as a user's turn; default: if there is a chat template.")
    ] = None,
    system: Annotated[str | None, Opt(help="System message of every chat that has none.")] = None,
    max_new_tokens: Annotated[int, Opt(help="Most tokens that follow a prompt.")] = 256,
    temperature: Annotated[float, Opt(help="0: the most likely token each time; 1: as the model was trained.")] = 0.0,
    top_p: Annotated[float | None, Opt(help="Draw from the likeliest tokens that sum to this; 1: all.")] = None,
    top_k: Annotated[int | None, Opt(help="Draw from this many likeliest tokens; 0: all.")] = None,
    seed: Annotated[int, Opt(help="Of the draws.")] = 0,
    batch: Annotated[int, Opt(min=1, help="Prompts that are computed at once.")] = 16,
    recipe: Annotated[str | None, Opt(help="Precision recipe; default: the model's own, else bf16.")] = None,
    tokenizer: Annotated[str | None, Opt(help="byte, a folder or a hub id; default: the model's own.")] = None,
    device: Annotated[str | None, Opt(help="cpu or cuda; default: cuda when there is one.")] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Generate text with a model: its own forward pass, greedy or sampled, many prompts at once."""
    from infir2_core.errors import InputError, UsageError

    if bool(prompt) == (file is not None):
        raise UsageError("give either --prompt or --file", "infir2 generate", "infir2 generate --prompt 'Hello'")
    if temperature == 0 and (top_p is not None or top_k is not None):
        raise UsageError("--top-p and --top-k choose among draws", "--temperature 0", "add --temperature 1")
    if system is not None and chat is False:
        raise UsageError("a system message needs the chat template", "--system, --raw", "keep one of them")
    from infir2_core.convert.ready import choose_recipe, end_ids, find_model, load_model
    from infir2_core.data.prompts import Prompt, read_prompts
    from infir2_core.data.tokenizer import load_tokenizer
    from infir2_core.machine import pick_device
    from infir2_core.model.generate import Generator, Sampling

    from ..exporting import find_source
    from ..generating import encode, run
    from ..progress import BytesBar

    settings = Sampling(max_new_tokens, temperature, 1.0 if top_p is None else top_p, top_k or 0, seed)
    prompts = read_prompts(file) if file else [Prompt(p, f"--prompt {n}") for n, p in enumerate(prompt or [], 1)]
    chosen = pick_device(device)
    found = find_model(find_source(model, "MODEL"), "MODEL")
    if not (tokenizer or found.tokenizer):
        hint = "--tokenizer FOLDER, a hub id, or byte"
        raise InputError("the model comes without a tokenizer", f"MODEL: {found.weights.path}", hint)
    used, own = choose_recipe(found, recipe), load_tokenizer(tokenizer or found.tokenizer)
    if own.size > found.weights.shape.vocab:
        what = f"the tokenizer has {own.size:,} ids, but the model's vocabulary has {found.weights.shape.vocab:,}"
        raise InputError(what, f"--tokenizer {own.ref}", "use the tokenizer that the model was trained with")
    ids = encode(
        prompts, own, found.chat if chat is None and not tokenizer else chat, system, found.weights.shape.max_positions
    )
    with BytesBar("loading") as bar:
        loaded, found = load_model(found, used, chosen, bar.update)
    generator = Generator(loaded, end_ids(found, own), batch)
    found.weights.close()
    people = console().is_terminal  # a pipe gets the text alone
    if people:
        say(f"{found.weights.path}: recipe {used.name}, {own.ref} tokenizer, {chosen}", style="dim")
    made = run(generator, prompts, ids, settings, own)
    tokens, seconds = sum(len(one["tokens"]) for one in made), max(one["seconds"] for one in made)
    ended = sum(one["finish"] == "stop" for one in made)
    if people:
        rate = f"{tokens:,} tokens, {tokens / seconds:,.1f} a second"
        say(f"{rate}; {ended} of {len(made)} ended by themselves", style="dim")
    facts = {"model": found.weights.path, "recipe": used.name, "tokenizer": own.ref, "device": chosen}
    emit(facts | {"tokens": tokens, "seconds": seconds, "tok_per_s": tokens / seconds, "generations": made})
