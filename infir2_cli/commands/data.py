"""`infir2 data`: text to a tokenised corpus, a look at corpora and chat data, and a small chat set to try."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infir2_cli.data_views import say_chat, say_facts, say_plan, say_result
from infir2_cli.output import DebugFlag, JsonFlag, console, emit, guarded, say
from infir2_core.errors import InputError, UsageError

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
        emit(planned, lambda: say_plan(planned))
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
    emit(result, lambda: say_result(result))


@app.command("show")
@guarded
def show(
    prefix: Annotated[str | None, typer.Argument(help="Prefix of a corpus; default: the project's first.")] = None,
    documents: Annotated[int, typer.Option(min=0, help="Documents to show, from the start.")] = 3,
    chat: Annotated[str | None, typer.Option(help="Chat data instead of a corpus: a file or folder.")] = None,
    tokenizer: Annotated[str, typer.Option(help="With --chat: byte, a folder, or a hub id.")] = "byte",
    index: Annotated[int, typer.Option(min=0, help="With --chat: which record, counted from 0.")] = 0,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show a corpus (documents as the model will see them, token counts), or what is trained of a chat sample."""
    from infir2_core.data.prefixes import strip_suffix
    from infir2_core.data.show import show_chat, summarise

    if chat is not None:
        if prefix is not None:
            raise UsageError("a corpus and chat data are named", "PREFIX and --chat", "give one of them")
        if not chat.strip():  # as a path it would be the current folder
            raise InputError("--chat is empty", "--chat", "name a file or folder of chats")
        shown = show_chat(Path(chat), tokenizer, index)
        emit(shown, lambda: say_chat(shown))
        return
    facts = summarise(strip_suffix(prefix or _project_corpus()), documents)
    emit(facts, lambda: say_facts(facts))


@app.command("chat-demo")
@guarded
def chat_demo(
    out: Annotated[Path, typer.Option(help="JSONL file to write.", show_default=False)],
    limit: Annotated[int, typer.Option(min=0, help="Samples at most; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the samples, and stop.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Write a chat set of real text: functions of the standard library, and the first sentence of what they do."""
    from infir2_core.data.docstrings import write_docstring_chat

    counts = write_docstring_chat(out, limit, seed, dry_run)
    would = "would write " if dry_run else ""
    emit(
        {"out": out, **counts},
        lambda: say(f"{would}{out}: {counts['samples']:,} samples\nlook at one:  infir2 data show --chat {out}"),
    )


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
