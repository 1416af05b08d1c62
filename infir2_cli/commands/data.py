"""`infir2 data prepare` and `infir2 data show`: text to a tokenised corpus, and a look at what is in one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infir2_cli.output import DebugFlag, JsonFlag, console, emit, guarded, say, table, warn
from infir2_core.errors import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress

app = typer.Typer(help="Prepare training data and look at it.", no_args_is_help=True)


@app.command("prepare")
@guarded
def prepare(
    source: Annotated[
        list[str], typer.Argument(help="Text, JSONL, Parquet, folders, python-stdlib.", show_default=False)
    ],
    out: Annotated[str, typer.Option(help="Prefix of the files to write: .bin, .idx, .json.", show_default=False)],
    tokenizer: Annotated[str, typer.Option(help="byte, a folder with tokenizer.json, or a hub id.")] = "byte",
    text_key: Annotated[str, typer.Option(help="JSONL key or Parquet column that holds the text.")] = "text",
    ext: Annotated[str, typer.Option(help="Suffixes to take from folders, such as .py,.md")] = "",
    workers: Annotated[int, typer.Option(min=0, help="Processes that tokenise; 0 means one a processor.")] = 0,
    limit_mb: Annotated[float, typer.Option(min=0, help="Stop after this many MB of text; 0: read all.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be read and written, and stop.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Tokenise text into a Megatron corpus. The same command again continues, or finds nothing to do."""
    from infir2_core.data import prepare as work

    extensions = [e for e in ext.replace(",", " ").split() if e]
    if dry_run:
        planned = work.plan(source, out, tokenizer, extensions, limit_mb)
        emit(planned, lambda: _say_plan(planned))
        return
    with _bar() as bar:
        stages = {"tokenise": bar.add_task("reading", total=None, tokens="")}

        def progress(stage: str, done: int, total: int, tokens: int) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task("writing", total=None, tokens="")
            shown = f"{tokens / 1e6:,.1f} M tokens" if tokens else ""
            bar.update(stages[stage], completed=done, total=total, tokens=shown)

        result = work.prepare(
            source,
            out,
            tokenizer,
            text_key=text_key,
            extensions=extensions,
            workers=workers,
            limit_mb=limit_mb,
            progress=progress,
        )
    emit(result, lambda: _say_result(result))


@app.command("show")
@guarded
def show(
    prefix: Annotated[str | None, typer.Argument(help="Prefix of a corpus; default: the project's first.")] = None,
    documents: Annotated[int, typer.Option(min=0, help="Documents to show, from the start.")] = 3,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show a corpus: documents as the model will see them, token counts, how long documents are."""
    from infir2_core.data.prefixes import strip_suffix
    from infir2_core.data.show import summarise

    facts = summarise(strip_suffix(prefix or _project_corpus()), documents)
    emit(facts, lambda: _say_facts(facts))


def _project_corpus() -> str:
    from infir2_core.config.project import find_project, load_project
    from infir2_core.data.prefixes import expand_prefixes

    where = find_project(Path.cwd())
    sections = list(load_project(where).data.values()) if where else []
    if not sections or where is None:
        raise UsageError("no corpus is named", "PREFIX", "infir2 data show PREFIX, or [data.NAME] in infir2.toml")
    return expand_prefixes(str(where.parent / sections[0].specs[0]))[0]


def _bar() -> Progress:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    shown, tokens = TextColumn("{task.description}"), TextColumn("{task.fields[tokens]}")
    bar = (shown, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), tokens)
    return Progress(*bar, console=console(), transient=True, disable=not console().is_terminal)


def _say_plan(planned: dict[str, Any]) -> None:
    size = {key: f"{planned[key] / 1e6:,.1f} MB" for key in ("bytes", "text_bytes", "output_bytes")}
    say(f"would read   {planned['files']:,} files, {size['bytes']} (about {size['text_bytes']} of text)")
    say(f"would write  {planned['prefix']}.bin: about {size['output_bytes']}, twice that while it runs; .idx and .json")
    say(f"tokenizer    {planned['tokenizer']['ref']} ({planned['tokenizer']['size']:,} ids)")


def _say_result(result: dict[str, Any]) -> None:
    prefix, ref = result["prefix"], result["tokenizer"]["ref"]
    if result["already"]:
        say(f"already prepared: {prefix} was made from these sources with these settings")
    say(f"{prefix}: {result['documents']:,} documents, {result['tokens']:,} tokens ({ref} tokenizer)")
    if result["reused"] and not result["already"]:
        say(f"{result['reused']} of {result['reused'] + result['tokenised']} blocks were already tokenised")
    if result["skipped"]:
        warn("left out: " + ", ".join(f"{count:,} {reason}" for reason, count in result["skipped"].items()))
    say(f"look at it:  infir2 data show {prefix}")


def _say_facts(facts: dict[str, Any]) -> None:
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
