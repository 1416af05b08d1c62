"""Launch scripts of Megatron-LM and slime, read without running anything.

A shell script is taken apart into assignments and the command that starts `pretrain_gpt.py`, `train.py` or
`train_async.py`; variables, arrays and integer arithmetic are put in, and what follows the program is its flags.
Command substitutions, loops and functions are not run: what depends on them is reported as it stands in the script.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...config.toml import read_text
from ...errors import InputError

PROGRAMS = ("pretrain_gpt.py", "train.py", "train_async.py")
_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


@dataclass(frozen=True)
class Script:
    """What a script says.

    Attributes:
        path: the file.
        program: which of `PROGRAMS` it starts.
        flags: name without dashes, words joined by underscores -> its values, in order; no value: an empty list.
        variables: assignments, exported or not.
        sourced: files that it reads in; those that are there have been read.
    """

    path: Path
    program: str
    flags: dict[str, list[str]]
    variables: dict[str, str]
    sourced: list[str] = field(default_factory=list)


def read_script(path: Path) -> Script:
    """Reads a launch script.

    Raises:
        InputError: it is missing, is no text, has an unclosed quote, or starts none of `PROGRAMS`.
    """
    variables: dict[str, str] = {}
    sourced: list[str] = []
    launched = _run(path, variables, sourced, depth=0)
    if launched is None:
        what = f"the script starts none of {', '.join(PROGRAMS)}"
        raise InputError(what, str(path), "give the script that launches Megatron-LM or slime")
    program, words = launched
    return Script(path, program, _flags(words), variables, sourced)


def _run(path: Path, variables: dict[str, str], sourced: list[str], depth: int) -> tuple[str, list[str]] | None:
    launched = None
    for line, statement in _statements(read_text(path)):
        match = _ASSIGNMENT.fullmatch(statement)
        try:
            if match:
                name, more, value = match.groups()
                words = _words(value[1:-1] if value.startswith("(") and value.endswith(")") else value, variables)
                text = " ".join(words)
                variables[name] = f"{variables.get(name, '')} {text}".strip() if more else text
                continue
            words = _words(statement, variables)
        except ValueError as error:
            raise InputError(f"the script cannot be read: {error}", f"{path}:{line}") from error
        if words and words[0] in ("source", ".") and len(words) > 1:
            sourced.append(words[1])
            target = Path(words[1])
            if depth < 4 and target.is_file():
                launched = _run(target, variables, sourced, depth + 1) or launched
            continue
        position = next((i for i, word in enumerate(words) if Path(word).name in PROGRAMS), None)
        if position is not None:
            launched = Path(words[position]).name, words[position + 1 :]
    return launched


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """(line, statement) with comments dropped, continued lines joined and arrays and quoted newlines kept together."""
    here, quote, depth, line, begun = "", "", 0, 1, 1
    position = 0
    while position < len(text):
        char, rest = text[position], text[position : position + 2]
        line += char == "\n"
        if rest == "\\\n" and quote != "'":
            here, position, line = here + " ", position + 2, line + 1
            continue
        if char == "\\" and quote != "'":
            here, position = here + rest, position + 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'`":
            quote = char
        elif char == "#" and (not here or here[-1] in " \t\n;("):
            while position < len(text) and text[position] != "\n":
                position += 1
            continue
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char in "\n;" and depth <= 0:
            if here.strip():
                yield begun, here.strip()
            here, depth, begun, position = "", 0, line, position + 1
            continue
        here, position = here + (" " if char == "\n" and not quote else char), position + 1
    if here.strip():
        yield begun, here.strip()


def _words(text: str, variables: dict[str, str]) -> list[str]:
    """The words of a statement with variables and arithmetic put in; single-quoted text is left alone."""
    parts = re.split(r"('[^']*')", text)
    return shlex.split("".join(part if part.startswith("'") else _expand(part, variables) for part in parts))


def _expand(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, fallback = match[1] or match[3], match[2]
        return variables.get(name) or (fallback if fallback is not None else "")

    text = _VARIABLE.sub(value, text)
    text = re.sub(r'"?\$\{?[@*]\}?"?', "", text)
    return _ARITHMETIC.sub(lambda match: _arithmetic(match[1], variables), text)


def _arithmetic(text: str, variables: dict[str, str]) -> str:
    """The value of an integer expression; the expression itself when it is more than that."""

    def evaluate(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -evaluate(node.operand)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(variables[node.id])
        raise ValueError(text)

    try:
        return str(evaluate(ast.parse(text.strip(), mode="eval").body))
    except (ValueError, SyntaxError, KeyError, ZeroDivisionError, RecursionError):
        return f"$(({text}))"


def _flags(words: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        match = re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL)
        if match:
            current = flags[match[1].replace("-", "_")] = [] if match[2] is None else [match[2]]
        elif current is not None:
            current.append(word)
    return flags
