"""Shell text taken apart, and words put together, without running anything.

Statements, quoting, redirections, here-documents, `$NAME`, `${NAME:-default}` and integer arithmetic are understood.
What only running would tell (command substitutions, other expansions, arguments of the script) is left as it stands;
`UNREAD` finds it.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_REDIRECTION = re.compile(r"(?:&>>?|<<<|<<-?|<>|>>|>&|>\||<&|>|<)[ \t]*")
_SEPARATOR = re.compile(r"&&|\|\||\|&|;;&|;&|;;|[\n;|&]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ARRAY = re.compile(r'"\$\{(\w+)\[@\]\}"')
_BRACED = re.compile(r"(\w+)(?:\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
UNREAD = re.compile(r"\$[({\d]|`")  # in a value: what only running the script would tell
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
LONGEST = 1 << 20  # characters of a value; a few lines that double one would fill the memory


def _quotient(a: int, b: int) -> int:
    """Rounded towards zero, as shells divide."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """A here-document: the line of its first line, whether its delimiter is quoted, and its text."""

    line: int
    quoted: bool
    text: str

    def expanded(self, variables: dict[str, str]) -> str:
        """The text as the command reads it."""
        if self.quoted:
            return self.text
        parts = re.split(r"(\\[\\$`\n])", self.text)
        return "".join(part[1].strip("\n") if i % 2 else expand(part, variables) for i, part in enumerate(parts))


@dataclass(frozen=True)
class Statement:
    """A command or assignment as it is written, without comments and redirections, continued lines joined.

    `before` is what separates it from the one before it; `documents` is what it reads, also through a pipe.
    """

    line: int
    text: str
    before: str
    documents: tuple[Document, ...] = ()


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

    @property
    def commands(self) -> bool:
        """Whether commands stand here: outside, or in parentheses that are no arithmetic."""
        return not self._open or (self._open[-1] == "(" and self._open[-2:-1] != ["("])

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


def statements(text: str) -> Iterator[Statement]:
    """The statements of a script. Arrays, quoted newlines and what stands in parentheses are kept together."""
    here, before, line, begun, position = "", "", 1, 1, 0
    documents: list[Document] = []
    resume = 0  # where the text goes on behind the here-documents of this line
    nesting, piped = _Nesting(), tuple[Document, ...]()
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
        if nesting.commands and (redirection := _REDIRECTION.match(text, position)):
            end = _word_end(text, redirection.end())
            if redirection[0].strip() in ("<<", "<<-"):
                word, first = text[redirection.end() : end], resume or _next_line(text, position)
                document, resume = _document(text, first, word, "-" in redirection[0])
                documents += [document] if nesting.outside else []
            if nesting.outside:
                here = re.sub(r"(^|\s)\d+$", r"\1", here) + " "
            else:
                here += text[position:end]
            position = end
            continue
        if nesting.outside and (separator := _SEPARATOR.match(text, position)):
            if here.strip():
                found = (*documents, *(piped if before in ("|", "|&") else ()))
                yield Statement(begun, here.strip(), before, found)
                before, piped = separator[0], found
            elif separator[0] != "\n":
                before = separator[0]
            here, nesting, documents = "", _Nesting(), []
            end = resume if resume and separator[0] == "\n" else separator.end()
            line, position = line + text.count("\n", position, end), end
            resume, begun = (0 if separator[0] == "\n" else resume), line
            continue
        subshell = here.lstrip().startswith("(")  # will be read as a script of its own
        if char == "\n" and resume:
            here += text[position:resume] if subshell else " "
            line, position, resume = line + text.count("\n", position, resume), resume, 0
            continue
        line += char == "\n"
        nesting.step(char, here[-1:])
        flat = char == "\n" and not nesting.quote and not subshell
        here, position = here + (" " if flat else char), position + 1
    if here.strip():
        yield Statement(begun, here.strip(), before, (*documents, *(piped if before in ("|", "|&") else ())))


def _next_line(text: str, position: int) -> int:
    """Where the line begins that follows the one of `position`, continued lines counted as one."""
    found = re.compile(r"(?<!\\)\n").search(text, position)
    return found.end() if found else len(text)


def _document(text: str, start: int, word: str, tabs: bool) -> tuple[Document, int]:
    """The here-document that begins at `start`, and where its closing line ends."""
    delimiter, end, held = re.sub(r"[\"'\\]", "", word), start, []
    while end < len(text):
        close = text.find("\n", end) + 1 or len(text)
        row = text[end:close]
        row, end = row.lstrip("\t") if tabs else row, close
        if row.rstrip("\n") == delimiter:
            break
        held.append(row)
    return Document(text.count("\n", 0, start) + 1, delimiter != word, "".join(held)), end


def _word_end(text: str, position: int) -> int:
    """Where the word ends that begins at `position`."""
    nesting, previous = _Nesting(), ""
    while position < len(text):
        char = text[position]
        if nesting.outside and (char.isspace() or char in ";|&<>)"):
            break
        nesting.step(char, previous)
        previous, position = char, position + 1
    return position


def split(statement: str) -> list[str]:
    """The words of a statement as they are written, quotes, arrays and substitutions kept whole."""
    found, here, position = [], "", 0
    nesting = _Nesting()
    while position < len(statement):
        char = statement[position]
        if char == "\\" and nesting.quote != "'":
            here, position = here + statement[position : position + 2], position + 2
            continue
        if nesting.outside and char.isspace():
            found.append(here)
            here = ""
        else:
            nesting.step(char, here[-1:])
            here += char
        position += 1
    return [word for word in (*found, here) if word]


def words(text: str, variables: dict[str, str]) -> list[str]:
    """The words of a statement with variables and arithmetic put in; single-quoted text is left alone.

    Raises:
        ValueError: a quote is not closed, or there are more than `LONGEST` characters.
    """
    text = _ARRAY.sub(lambda match: _array(match, variables), text)
    if len(text) > LONGEST:
        raise ValueError(f"a value has more than {LONGEST:,} characters")
    parts = re.split(r"('[^']*')", text)
    return shlex.split("".join(part if part.startswith("'") else expand(part, variables, True) for part in parts))


def _array(match: re.Match[str], variables: dict[str, str]) -> str:
    """What stands for `"${NAME[@]}"`: the words of an array, nothing when it is not set, else the text as it is."""
    name = match[1]
    return variables.get(f"{name}[@]", match[0] if name in variables else "")


def expand(text: str, variables: dict[str, str], literal: bool = False) -> str:
    """`text` with variables and arithmetic put in; those that are not set are empty.

    Args:
        literal: double quotes and backslashes in values are escaped, so that they quote nothing.

    Raises:
        ValueError: that makes more than `LONGEST` characters.
    """
    text = re.sub(r'"?\$(?:[@*]|\{[@*]\})"?', "", text)
    parts, position = [], 0
    while (start := text.find("$", position)) >= 0:
        parts.append(text[position:start])
        end = start + 1
        if name := _NAME.match(text, end):
            parts.append(_escaped(variables.get(name[0], ""), literal))
            end = name.end()
        elif text[end : end + 1] == "{":
            end = _brace_end(text, end)
            parts.append(_braced(text[start:end], variables, literal))
        else:
            parts.append("$")
        position = end
    text = "".join(parts) + text[position:]
    if len(text) > LONGEST:
        raise ValueError(f"a value has more than {LONGEST:,} characters")
    return _ARITHMETIC.sub(lambda match: _arithmetic(match[1], variables), text)


def _escaped(value: str, literal: bool) -> str:
    return re.sub(r'(["\\])', r"\\\1", value) if literal else value


def _brace_end(text: str, start: int) -> int:
    """One past the brace that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if not depth:
            return position + 1
    return len(text)


def _braced(text: str, variables: dict[str, str], literal: bool) -> str:
    """The value of `${NAME}`, `${NAME:-default}` or `${NAME:=default}`; other expansions stay as they are."""
    match = _BRACED.fullmatch(text[2:-1])
    if match is None or (match[1][0].isdigit() and match[2] is None):
        return text
    name, kind, fallback = match.groups()
    if kind is None or variables.get(name) or (":" not in kind and name in variables):
        return _escaped(variables.get(name, ""), literal)
    value = expand(fallback, variables, literal)
    if kind.endswith("="):
        variables[name] = value
    return value


def _arithmetic(text: str, variables: dict[str, str]) -> str:
    """The value of an integer expression; the expression itself when it is more than that."""

    def evaluate(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            value = _OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
            return (value + (1 << 63)) % (1 << 64) - (1 << 63)  # 64 bits, as shells have
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
