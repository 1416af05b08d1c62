"""Launch scripts of Megatron-LM and slime, read without running anything.

A shell script is taken apart into assignments and the command that starts `pretrain_gpt.py`, `train.py` or
`train_async.py`; variables, arrays and integer arithmetic are put in, and what follows the program is its flags.
Command substitutions and loops are not run: what depends on them is reported as it stands in the script, and so are
assignments that depend on a condition.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...config.toml import read_text
from ...errors import InputError

PROGRAMS = ("pretrain_gpt.py", "train.py", "train_async.py")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARING = ("export", "local", "readonly", "declare", "typeset")
_OPENING, _CLOSING = ("if", "while", "until", "for", "case", "select"), ("fi", "done", "esac")
_LEADING = ("then", "else", "elif", "do", "if", "while", "until", "!", "{", "time")
_REDIRECTION = re.compile(r"(?:&>>?|<<<|<<-?|<>|>>|>&|>\||<&|>|<)[ \t]*")
_SEPARATOR = re.compile(r"&&|\|\||\|&|[\n;|&]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACED = re.compile(r"(\w+)(?:\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
UNREAD = re.compile(r"\$[({\d]|`")  # in a value: what only running the script would tell
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
        variables: assignments, exported or not, and the environment that Ray gives the program.
        garbled: Ray's `--runtime-env-json` is there and is no JSON.
        sourced: files that it reads in; those that are there have been read.
        conditional: assignments that depend on a condition or stand in a loop, as written, and so were not made.
    """

    path: Path
    program: str
    flags: dict[str, list[str]]
    variables: dict[str, str]
    sourced: list[str] = field(default_factory=list)
    conditional: list[str] = field(default_factory=list)
    garbled: bool = False


def read_script(path: Path) -> Script:
    """Reads a launch script.

    Raises:
        InputError: it is missing, is no text, has an unclosed quote, or starts none of `PROGRAMS`.
    """
    script = Script(path, "", {}, {})
    launched = _run(path, script, depth=0)
    if launched is None:
        what = f"the script starts none of {', '.join(PROGRAMS)}"
        raise InputError(what, str(path), "give the script that launches Megatron-LM or slime")
    before, program, words = launched
    environment = _runtime(before)
    variables = script.variables | (environment or {})
    return replace(script, program=program, flags=_flags(words), variables=variables, garbled=environment is None)


def _runtime(words: list[str]) -> dict[str, str] | None:
    """The variables in `ray job submit --runtime-env-json TEXT`; None when that is no JSON."""
    given = _flags(words).get("runtime_env_json", ["{}"])
    try:
        return {name: str(value) for name, value in json.loads(given[0]).get("env_vars", {}).items()}
    except (ValueError, AttributeError, IndexError):
        return None


def _run(path: Path, script: Script, depth: int) -> tuple[list[str], str, list[str]] | None:
    launched, variables = None, script.variables
    blocks, assigned = 0, False
    for line, statement, before in _statements(read_text(path)):
        doubtful = before in ("&&", "||") and not (before == "&&" and assigned)
        raw = _split(re.sub(r"^[^\s()\"'=]*\)\s*", "", statement) if blocks else statement)
        while raw and raw[0] in (*_OPENING, *_CLOSING, *_LEADING):
            blocks = max(0, blocks + (raw[0] in _OPENING) - (raw[0] in _CLOSING))
            raw = raw[1:] if raw[0] in _LEADING else []
        matches, rest = _assignments(raw)
        assigned = bool(matches) and not rest
        try:
            if assigned and (blocks or doubtful):
                script.conditional.extend(f"{path.name}:{line} {match[0]}" for match in matches)
                continue
            if assigned:
                for match in matches:
                    _assign(match, variables)
                continue
            words = _words(" ".join(rest), variables)
        except ValueError as error:
            raise InputError(f"the script cannot be read: {error}", f"{path}:{line}") from error
        if words and words[0] in ("source", ".") and len(words) > 1:
            script.sourced.append(words[1])
            target = Path(words[1])
            if depth < 4 and target.is_file():
                launched = _run(target, script, depth + 1) or launched
            continue
        position = next((i for i, word in enumerate(words) if Path(word).name in PROGRAMS), None)
        if position is not None:
            launched = words[:position], Path(words[position]).name, words[position + 1 :]
            for match in matches:  # the environment of the program alone
                _assign(match, variables)
    return launched


def _assignments(raw: list[str]) -> tuple[list[re.Match[str]], list[str]]:
    """The assignments that a statement begins with, and the command after them."""
    if raw and raw[0] in _DECLARING:
        return [match for match in map(_ASSIGNMENT.fullmatch, raw[1:]) if match], []
    matches = []
    for word in raw:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            break
        matches.append(match)
    return matches, raw[len(matches) :]


def _assign(match: re.Match[str], variables: dict[str, str]) -> None:
    name, more, value = match.groups()
    array = value.startswith("(") and value.endswith(")")
    words = _words(value[1:-1] if array else value, variables)
    text = " ".join(words)
    before = variables.pop(f"{name}[@]", "")  # of arrays, the words as well
    if array:
        variables[f"{name}[@]"] = f"{before if more else ''} {shlex.join(words)}".strip()
    variables[name] = f"{variables.get(name, '')} {text}".strip() if more else text


class _Nesting:
    """Quotes, parentheses and `${...}` while characters of a script go by."""

    def __init__(self) -> None:
        self._open: list[str] = []

    @property
    def quote(self) -> str:
        """The innermost quote; empty outside of quotes and inside a substitution in them."""
        return self._open[-1] if self._open and self._open[-1] in "\"'`" else ""

    @property
    def outside(self) -> bool:
        """Whether nothing is open."""
        return not self._open

    def step(self, char: str, previous: str) -> None:
        """One more character, `previous` before it; escaped ones are not given."""
        top = self._open[-1] if self._open else ""
        if self.quote and char == top:
            self._open.pop()
        elif self.quote == '"' and char in "({" and previous == "$":
            self._open.append(char)
        elif self.quote:
            pass
        elif char in "\"'`" or char == "(" or (char == "{" and previous == "$"):
            self._open.append(char)
        elif (top, char) in (("(", ")"), ("{", "}")):
            self._open.pop()


def _statements(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, statement, what stands before it): comments and redirections dropped, continued lines joined.

    Arrays and quoted newlines are kept together.
    """
    here, before, line, begun, position = "", "", 1, 1, 0
    nesting = _Nesting()
    while position < len(text):
        char, rest = text[position], text[position : position + 2]
        if rest == "\\\n" and nesting.quote != "'":
            here, position, line = here + " ", position + 2, line + 1
            continue
        if char == "\\" and nesting.quote != "'":
            here, position = here + rest, position + 2
            continue
        if not nesting.quote and char == "#" and (not here or here[-1] in " \t\n;("):
            while position < len(text) and text[position] != "\n":
                position += 1
            continue
        if nesting.outside:
            if redirection := _REDIRECTION.match(text, position):
                here = re.sub(r"(^|\s)\d+$", r"\1", here) + " "
                position = _word_end(text, redirection.end())
                continue
            if separator := _SEPARATOR.match(text, position):
                line += separator[0] == "\n"
                if here.strip():
                    yield begun, here.strip(), before
                    before = separator[0]
                elif separator[0] != "\n":
                    before = separator[0]
                here, begun, position, nesting = "", line, separator.end(), _Nesting()
                continue
        line += char == "\n"
        nesting.step(char, here[-1:])
        here, position = here + (" " if char == "\n" and not nesting.quote else char), position + 1
    if here.strip():
        yield begun, here.strip(), before


def _word_end(text: str, position: int) -> int:
    """Where the word ends that begins at `position`."""
    nesting, previous = _Nesting(), ""
    while position < len(text):
        char = text[position]
        if nesting.outside and (char.isspace() or char in ";|&<>"):
            break
        nesting.step(char, previous)
        previous, position = char, position + 1
    return position


def _split(statement: str) -> list[str]:
    """The words of a statement as they are written, quotes, arrays and substitutions kept whole."""
    words, here, position = [], "", 0
    nesting = _Nesting()
    while position < len(statement):
        char = statement[position]
        if char == "\\" and nesting.quote != "'":
            here, position = here + statement[position : position + 2], position + 2
            continue
        if nesting.outside and char.isspace():
            words.append(here)
            here = ""
        else:
            nesting.step(char, here[-1:])
            here += char
        position += 1
    return [word for word in (*words, here) if word]


def _words(text: str, variables: dict[str, str]) -> list[str]:
    """The words of a statement with variables and arithmetic put in; single-quoted text is left alone."""
    text = re.sub(r'"\$\{(\w+)\[@\]\}"', lambda match: _array(match[1], match[0], variables), text)
    parts = re.split(r"('[^']*')", text)
    return shlex.split("".join(part if part.startswith("'") else _expand(part, variables) for part in parts))


def _array(name: str, text: str, variables: dict[str, str]) -> str:
    """What stands for `"${NAME[@]}"`: the words of an array, nothing when it is not set, else the text as it is."""
    return variables.get(f"{name}[@]", text if name in variables else "")


def _expand(text: str, variables: dict[str, str]) -> str:
    text = re.sub(r'"?\$(?:[@*]|\{[@*]\})"?', "", text)
    parts, position = [], 0
    while (start := text.find("$", position)) >= 0:
        parts.append(text[position:start])
        end = start + 1
        if name := _NAME.match(text, end):
            parts.append(_literal(variables.get(name[0], "")))
            end = name.end()
        elif text[end : end + 1] == "{":
            end = _brace_end(text, end)
            parts.append(_braced(text[start:end], variables))
        else:
            parts.append("$")
        position = end
    text = "".join(parts) + text[position:]
    return _ARITHMETIC.sub(lambda match: _arithmetic(match[1], variables), text)


def _literal(value: str) -> str:
    """The value of a variable for `shlex`: double quotes in it quote nothing."""
    return re.sub(r'(["\\])', r"\\\1", value)


def _brace_end(text: str, start: int) -> int:
    """One past the brace that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if not depth:
            return position + 1
    return len(text)


def _braced(text: str, variables: dict[str, str]) -> str:
    """The value of `${NAME}`, `${NAME:-default}` or `${NAME:=default}`; other expansions stay as they are."""
    match = _BRACED.fullmatch(text[2:-1])
    if match is None or (match[1][0].isdigit() and match[2] is None):
        return text
    name, kind, fallback = match.groups()
    if kind is None or variables.get(name) or (":" not in kind and name in variables):
        return _literal(variables.get(name, ""))
    value = _expand(fallback, variables)
    if kind.endswith("="):
        variables[name] = value
    return value


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
