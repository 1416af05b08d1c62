"""A small chat set of real text that is on every machine: Python functions and what they do.

The standard library is read, not imported. A question is the module and the signature of a function, the answer the
first sentence of its docstring.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from infir2_core.data.chat_set import epoch_order
from infir2_core.data.sources import STDLIB, find_files
from infir2_core.errors import InputError

SUFFIXES = (".jsonl", ".ndjson")
QUESTION = 240  # characters at most
ANSWER = range(12, 161)  # characters; shorter ones say nothing


def write_docstring_chat(out: Path, limit: int = 0, seed: int = 0, dry_run: bool = False) -> dict[str, int]:
    """Writes the JSONL file `out`, one object with `id` and `messages` a line, in an order drawn from `seed`.

    Args:
        out: file to write, .jsonl or .ndjson; its folder is made. An existing file is replaced, once the new one is
            whole, if each of its lines is one that this function writes.
        limit: samples at most; 0 writes all.
        dry_run: only count.

    Returns:
        functions (with a docstring that fits), samples (no question and no id twice).

    Raises:
        InputError: `out` cannot be written, holds something else, or has a name that is not read as chats.
    """
    _check_place(out)
    found = _answered()
    questions: dict[str, tuple[str, str]] = {}
    seen: set[str] = set()
    for name, question, answer in found:
        if question not in questions and name not in seen:
            questions[question] = (name, answer)
            seen.add(name)
    samples = [(name, question, answer) for question, (name, answer) in questions.items()]
    chosen = [samples[n] for n in epoch_order(len(samples), seed, 0)[: limit or None]]
    counts = {"functions": len(found), "samples": len(chosen)}
    if dry_run:
        return counts
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text("".join(_line(*sample) for sample in chosen), encoding="utf-8")
        os.replace(aside, out)
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"cannot write here: {error.strerror}", str(out), "choose another --out") from None
    finally:
        with suppress(OSError):  # it was renamed, or never there
            aside.unlink()
    return counts


def _check_place(out: Path) -> None:
    """Refuses what would be lost, or could not be read afterwards."""
    where = f"--out {out}"
    if not out.name:
        raise InputError("this names no file", where, "--out data/chat.jsonl")
    if out.suffix not in SUFFIXES:
        what = f"this would not be read as chats: the demo is written as {' or '.join(SUFFIXES)}"
        raise InputError(what, where, f"--out {out.with_name((out.name.partition('.')[0] or 'chat') + '.jsonl')}")
    try:
        taken = out.is_symlink() or (out.exists() and not (out.is_file() and _is_demo(out)))
    except OSError as error:
        raise InputError(f"cannot write here: {error.strerror}", where, "choose another --out") from None
    if taken:
        what = "something else than a demo set is here, and would be overwritten"
        raise InputError(what, where, "choose another --out, or remove it")


def _is_demo(path: Path) -> bool:
    """Whether every line is one of this module's."""
    try:
        with open(path, encoding="utf-8", newline="\n") as lines:
            return all(_is_line(line) for line in lines)
    except UnicodeDecodeError:
        return False


def _is_line(line: str) -> bool:
    try:
        record = json.loads(line)
        question, answer = (message["content"] for message in record["messages"])
        return question.startswith("# ") and line == _line(record["id"], question, answer)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return False


def _line(name: str, question: str, answer: str) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"id": name, "messages": messages}, ensure_ascii=False) + "\n"


@cache  # parsing the whole library takes seconds
def _answered() -> tuple[tuple[str, str, str], ...]:
    return tuple(_find_answered())


def _find_answered() -> Iterator[tuple[str, str, str]]:
    """(qualified name, question, answer) of every function with a docstring that fits, in the order of the files."""
    for file in find_files([STDLIB]):
        try:
            tree = ast.parse(file.path.read_bytes())
        except (SyntaxError, ValueError):  # templates and samples of other versions
            continue
        module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name, function in _functions(tree, module):
            question, answer = f"# {module}\n{_signature(function)}", _sentence(ast.get_docstring(function) or "")
            if len(question) <= QUESTION and len(answer) in ANSWER:
                yield name, question, answer


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}.{child.name}", child
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _functions(child, f"{prefix}.{child.name}")


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    start = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    return f"{start} {function.name}({ast.unparse(function.args)}){returns}:"


def _sentence(docstring: str) -> str:
    """The first sentence, on one line; empty when the first paragraph has no sentence that ends."""
    paragraph = " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
    match = re.match(r".*?[.!?](?=\s|$)", paragraph)
    return match.group() if match else ""
