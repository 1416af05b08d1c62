"""Launch scripts of Megatron-LM and slime, read without running anything.

A shell script is followed from its assignments to the commands that start `pretrain_gpt.py`, `train.py` or
`train_async.py`; what follows the program is its flags. The branch of an `if` or `case` that a launch stands in is
taken as it stands; what other branches and loops assign is not made but reported. Where several launches differ in a
flag, neither value is taken. Here-documents are text, unless a shell reads them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...config.toml import read_text
from ...errors import InputError
from .shell import Document, Statement, split, statements, words

PROGRAMS = ("pretrain_gpt.py", "train.py", "train_async.py")
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh", "sbatch", "ssh")  # what runs a script that it reads
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARING = ("export", "local", "readonly", "declare", "typeset")
_OPENING, _CLOSING = ("if", "while", "until", "for", "case", "select"), ("fi", "done", "esac")
_LEADING = ("then", "else", "elif", "do", "!", "{", "time")
_FUNCTION = re.compile(r"(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([\w-]+)\s*\(\s*\))\s*(?=[{(]|$)")
_GROUP = re.compile(r"(?:(?:then|else|do|!|time)\s+)*\{(?:\s|$)")
_CASE = re.compile(r"case\s.*?\sin(?:\s+|$)", re.DOTALL)
_PATTERN = re.compile(r"\(?(?:[^()\"']|\"[^\"]*\"|'[^']*')*\)\s*")
_DEPTH = 4  # of files, here-documents and commands inside of commands
_STATEMENTS = 100_000  # in all, functions that are called again counted again

Place = tuple[tuple[int, int], ...]  # (block, branch of it) from the outermost to the innermost


@dataclass(frozen=True)
class Launch:
    """A command that starts one of `PROGRAMS`.

    Attributes:
        where: file and line.
        program: which of them.
        flags: name without dashes, words joined by underscores -> its values, in order; no value: an empty list.
        variables: what was assigned before it, exported or not, and the environment that Ray is told to give it; of
            arrays also `NAME[@]`, their words quoted.
        place: the blocks that it stands in.
        garbled: what Ray is told is no JSON.
    """

    where: str
    program: str
    flags: dict[str, list[str]]
    variables: dict[str, str]
    place: Place
    garbled: bool = False

    @property
    def conditional(self) -> bool:
        """Whether a condition or a loop decides that it runs; the condition itself always does."""
        return any(branch for _, branch in self.place)


@dataclass(frozen=True)
class Script:
    """What a script says.

    Attributes:
        path: the file.
        launches: at least one, all of the same program.
        sourced: files that it reads in; those that are there have been read.
        conditional: assignments that depend on a condition or stand in a loop, as written, and so were not made.
    """

    path: Path
    launches: list[Launch]
    sourced: list[str]
    conditional: list[str]

    @property
    def program(self) -> str:
        """Which of `PROGRAMS` it starts."""
        return self.launches[0].program

    @property
    def flags(self) -> dict[str, list[str]]:
        """The flags in which all launches agree."""
        first, *others = (launch.flags for launch in self.launches)
        return {name: values for name, values in first.items() if all(other.get(name) == values for other in others)}

    @property
    def differing(self) -> dict[str, list[list[str] | None]]:
        """The other flags: the values of each launch, None where it lacks the flag."""
        names = dict.fromkeys(name for launch in self.launches for name in launch.flags)
        return {name: [launch.flags.get(name) for launch in self.launches] for name in names if name not in self.flags}

    @property
    def variables(self) -> dict[str, str]:
        """What was assigned before the last launch."""
        return self.launches[-1].variables


def read_script(path: Path) -> Script:
    """Reads a launch script.

    Raises:
        InputError: it is missing, is no text, has an unclosed quote, or starts none or several of `PROGRAMS`.
    """
    reader = _Reader(files=[os.path.realpath(path)])
    reader.read(read_text(path), path)
    launches = [launch for launch in reader.launches if launch.flags] or reader.launches
    if not launches:
        what, hint = (
            f"the script starts none of {', '.join(PROGRAMS)}",
            "give the script that launches Megatron-LM or slime",
        )
        if reader.passed:
            hint = f"save the here-document at {reader.passed[0]} as a script of its own and give that"
        raise InputError(what, str(path), hint)
    if len({launch.program for launch in launches}) > 1:
        listed = ", ".join(f"{launch.program} ({launch.where})" for launch in launches)
        raise InputError(f"the script starts several programs: {listed}", str(path), "give a script that starts one")
    taken = [
        text
        for text, place in reader.conditional
        if not all(launch.place[: len(place)] == place for launch in launches)
    ]
    return Script(path, launches, reader.sourced, taken)


@dataclass
class _Block:
    """An `if`, `case` or loop that is open: where it stands, which of its branches, and the variables before it."""

    kind: str
    number: int
    variables: dict[str, str]
    branch: int = 0
    pattern: bool = False  # the next statement of a `case` begins with a pattern


@dataclass
class _Reader:
    """Goes through scripts and keeps what they assign and launch."""

    variables: dict[str, str] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    sourced: list[str] = field(default_factory=list)
    conditional: list[tuple[str, Place]] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)  # here-documents that name a program and that no shell reads
    functions: dict[str, tuple[list[Statement], Path, int]] = field(default_factory=dict)
    blocks: list[_Block] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # that are being read in, so that none reads itself
    opened: int = 0
    followed: int = 0
    depth: int = 0

    def read(self, text: str, path: Path, above: int = 0) -> None:
        """Goes through a script; `above` is the number of lines of the file before it."""
        if self.depth > _DEPTH:
            return
        self.depth += 1
        height, assigned = len(self.blocks), False
        rest = statements(text)
        for statement in rest:
            if found := _FUNCTION.match(statement.text):
                begun = replace(statement, text=statement.text[found.end() :])
                self.functions[found[1] or found[2]] = _body(begun, rest), path, above
            else:
                assigned = self._followed(statement, path, above, assigned)
        if len(self.blocks) > height:
            self.variables = self.blocks[height].variables
            del self.blocks[height:]
        self.depth -= 1

    def _followed(self, statement: Statement, path: Path, above: int, assigned: bool) -> bool:
        where = f"{path}:{above + statement.line}"
        self.followed += 1
        try:
            if self.followed > _STATEMENTS:
                raise ValueError(f"it goes on for more than {_STATEMENTS:,} statements")
            return self._statement(statement, path, above, assigned)
        except ValueError as error:
            raise InputError(f"the script cannot be read: {error}", where) from error

    def _statement(self, statement: Statement, path: Path, above: int, assigned: bool) -> bool:
        """Follows one statement; whether it does nothing but assign."""
        line = above + statement.line
        raw = split(self._command(statement))
        if raw and raw[0].startswith("(") and not raw[0].startswith("(("):  # a subshell
            self._apart(" ".join(raw).removeprefix("(").removesuffix(")"), path, line - 1)
            return False
        matches, rest = _assignments(raw)
        if matches and not rest:
            chained = statement.before == "&&" and assigned
            doubtful = statement.before in ("&&", "||") and not chained
            if doubtful or self._place():
                place = (*self._place(), (0, 1)) if doubtful else self._place()
                self.conditional.extend((f"{path.name}:{line} {match[0]}", place) for match in matches)
            for match in [] if doubtful else matches:
                _assign(match, self.variables)
            return True
        self._run(words(" ".join(rest), self.variables), matches, statement.documents, path, line)
        return False

    def _command(self, statement: Statement) -> str:
        """The statement without the words that open, part and close blocks, which are followed."""
        text, before = statement.text, statement.before
        while text:
            block = self.blocks[-1] if self.blocks else None
            word = text.split(None, 1)[0]
            if block and block.kind == "case" and word != "esac" and (block.pattern or before in (";;", ";&", ";;&")):
                found = _PATTERN.match(text)
                block.pattern = found is None  # a | b) is two statements
                self._branch(block)
                before, text = "", text[found.end() :] if found else ""
            elif word in _OPENING:
                self.opened += 1
                if (name := text.split()[1:2]) and word in ("for", "select"):
                    self._unsettle(name)
                self.blocks.append(_Block(word, self.opened, dict(self.variables), pattern=word == "case"))
                rest = _CASE.sub("", text, count=1) if word == "case" else text[len(word) :].lstrip()
                text = "" if word in ("for", "select") else rest
            elif word in _CLOSING:
                if block:
                    self.variables = self.blocks.pop().variables
                text = ""
            elif word in _LEADING:
                if block and word in ("else", "elif"):
                    self._branch(block)
                elif block and word in ("then", "do"):
                    block.branch += 1
                text = text[len(word) :].lstrip()
            else:
                break
        return text

    def _branch(self, block: _Block) -> None:
        block.branch += 1
        self.variables = dict(block.variables)

    def _unsettle(self, names: list[str]) -> None:
        """Variables whose values only running would tell."""
        self.variables |= {name: f"${{{name}}}" for name in names if name.isidentifier()}

    def _place(self) -> Place:
        return tuple((block.number, block.branch) for block in self.blocks)

    def _apart(self, text: str, path: Path, above: int) -> None:
        """Reads a script whose assignments end with it."""
        before, self.variables = self.variables, dict(self.variables)
        self.read(text, path, above)
        self.variables = before

    def _run(
        self, command: list[str], matches: list[re.Match[str]], documents: tuple[Document, ...], path: Path, line: int
    ) -> None:
        if not command:
            return
        names = [Path(word).name for word in command]
        if command[0] == "read":
            self._unsettle(command[1:])
        elif command[0] in ("source", ".") and len(command) > 1:
            self.sourced.append(command[1])
            target = Path(command[1])
            if target.is_file() and os.path.realpath(target) not in self.files:
                self.files.append(os.path.realpath(target))
                self.read(read_text(target), target)
                self.files.pop()
        elif command[0] in self.functions and self.depth <= _DEPTH:
            body, home, above = self.functions[command[0]]
            self.depth += 1
            for statement in body:
                self._followed(statement, home, above, False)
            self.depth -= 1
        elif command[0] == "eval":
            self.read(" ".join(command[1:]), path, line - 1)
        elif command[0] in ("echo", "printf"):
            self._documents(documents, False, path)
        elif (position := next((i for i, name in enumerate(names) if name in PROGRAMS), None)) is not None:
            variables = dict(self.variables)
            for match in matches:  # the environment of the program alone
                _assign(match, variables)
            environment = _environment(command[:position])
            variables |= environment or {}
            flags, where = _flags(command[position + 1 :]), f"{path.name}:{line}"
            garbled = environment is None
            self.launches.append(Launch(where, names[position], flags, variables, self._place(), garbled))
        else:
            shell = next((i for i, name in enumerate(names) if name in _SHELLS), None)
            self._documents(documents, shell is not None, path)
            options = range(len(names) if shell is None else shell + 1, len(names) - 1)
            if (option := next((i for i in options if re.fullmatch(r"-\w*c", command[i])), None)) is not None:
                self._apart(command[option + 1], path, line - 1)

    def _documents(self, documents: tuple[Document, ...], executed: bool, path: Path) -> None:
        for document in documents:
            if executed:
                self._apart(document.expanded(self.variables), path, document.line - 1)
            elif any(program in document.text for program in PROGRAMS):
                self.passed.append(f"{path.name}:{document.line}")


def _body(begun: Statement, rest: Iterator[Statement]) -> list[Statement]:
    """The statements of a function whose body begins in `begun` and goes on in `rest`."""
    found: list[Statement] = []
    if begun.text.startswith("("):
        return [begun]
    depth = 0
    statement: Statement | None = begun if begun.text else next(rest, None)
    while statement is not None:
        depth += bool(_GROUP.match(statement.text)) - (statement.text.split(None, 1)[0] == "}")
        if depth <= 0:
            break
        found.append(replace(statement, before="") if not found else statement)
        statement = next(rest, None)
    return found


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
    found = words(value[1:-1] if array else value, variables)
    text, before = " ".join(found), variables.pop(f"{name}[@]", "")
    if array:
        variables[f"{name}[@]"] = f"{before if more else ''} {shlex.join(found)}".strip()
    variables[name] = f"{variables.get(name, '')} {text}".strip() if more else text


def _environment(command: list[str]) -> dict[str, str] | None:
    """The variables in `ray job submit --runtime-env-json TEXT`; None when that is no JSON."""
    given = _flags(command).get("runtime_env_json", ["{}"])
    try:
        return {name: str(value) for name, value in json.loads(given[0]).get("env_vars", {}).items()}
    except (ValueError, AttributeError, IndexError, RecursionError):
        return None


def _flags(command: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in command:
        match = re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL)
        if match:
            current = flags[match[1].replace("-", "_")] = [] if match[2] is None else [match[2]]
        elif current is not None:
            current.append(word)
    return flags
