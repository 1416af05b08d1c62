"""What `infir2 data` shows people: plans, corpora and conversations drawn from plain data."""

from __future__ import annotations

from typing import Any

from .output import in_colour, paint, say, table, warn

TRAINED, MASKED = "green", "bright_black"
MARKS = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}", "\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"


def say_plan(planned: dict[str, Any]) -> None:
    size = {key: f"{planned[key] / 1e6:,.1f} MB" for key in ("bytes", "text_bytes", "output_bytes")}
    say(f"would read   {planned['files']:,} files, {size['bytes']} (about {size['text_bytes']} of text)")
    say(f"would write  {planned['prefix']}.bin: about {size['output_bytes']}, twice that while it runs; .idx and .json")
    say(f"tokenizer    {planned['tokenizer']['ref']} ({planned['tokenizer']['size']:,} ids)")


def say_result(result: dict[str, Any]) -> None:
    prefix, ref = result["prefix"], result["tokenizer"]["ref"]
    if result["already"]:
        say(f"already prepared: {prefix} was made from these sources with these settings")
    say(f"{prefix}: {result['documents']:,} documents, {result['tokens']:,} tokens ({ref} tokenizer)")
    if result["reused"] and not result["already"]:
        say(f"{result['reused']} of {result['reused'] + result['tokenised']} blocks were already tokenised")
    if result["skipped"]:
        warn("left out: " + ", ".join(f"{count:,} {reason}" for reason, count in result["skipped"].items()))
    say(f"look at it:  infir2 data show {prefix}")


def say_facts(facts: dict[str, Any]) -> None:
    for sample in facts["samples"]:
        say(f"--- document {sample['document']}, {sample['tokens']:,} tokens ---", style="bold")
        say(" ".join(map(str, sample["ids"])) if sample["text"] is None else sample["text"])
    size = f"{facts['bytes'] / 1e6:,.1f} MB as {facts['dtype']}"
    say(f"\n{facts['prefix']}: {facts['documents']:,} documents, {facts['tokens']:,} tokens, {size}")
    if facts["made"]:
        say("tokenizer {ref} ({size:,} ids, document end {eod})".format(**facts["made"]["tokenizer"]))
    if facts["note"]:
        warn(facts["note"])
    lengths = "shortest {shortest:,}, median {median:,.0f}, mean {mean:,.0f}, longest {longest:,}"
    say("tokens in a document: " + lengths.format(**facts["lengths"]))
    bars, most = facts["histogram"], max(b["documents"] for b in facts["histogram"])
    cells = [(f"{b['from']:,}-{b['to'] - 1:,}", b["documents"], b["tokens"]) for b in bars]
    rows = [[name, f"{count:,}", f"{tokens:,}", "#" * -(-40 * count // most)] for name, count, tokens in cells]
    table("", ["length", "documents", "tokens", ""], rows)


def say_chat(shown: dict[str, Any]) -> None:
    """A conversation, tokens that are trained apart from the others: by colour, or by marks where there is none."""
    tokens = f"{shown['tokens']:,} tokens, {shown['trained_tokens']:,} trained"
    say(f"--- {shown['where']} ({shown['layout']}): {shown['messages']} messages, {tokens} ---", style="bold")
    if in_colour():
        paint([(part["text"], TRAINED if part["trained"] else MASKED) for part in shown["parts"]])
        paint([("trained", TRAINED), (", ", ""), ("not trained", MASKED)])
    else:
        say("".join(part["text"].join(MARKS) if part["trained"] else part["text"] for part in shown["parts"]))
        say(f"{'trained'.join(MARKS)}, not trained")
    say(f"the assistant's turn ends with {shown['turn_end']} (id {shown['turn_end_id']})")
    if shown["folded"]:
        warn("the template knows no reasoning_content: it stands in front of the content as <think>...</think>")
