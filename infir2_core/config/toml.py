"""TOML files in and out, with errors that name file, line and key.

`tomllib` says where a syntax error is, but not where a key stands; `locate` finds that, so that a wrong value is
reported as `infir2.toml:12`. `validate` turns a parsed file into a pydantic model and every problem of it into one
`InputError` written for people. Nothing here knows what a key means.
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from ..errors import InputError, nearest

Model = TypeVar("Model", bound=BaseModel)
Key = Sequence[str | int]


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, a byte order mark dropped.

    Raises:
        InputError: the file is missing, is a folder, may not be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read the file: {error.strerror or error}", str(path)) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError("the file is not UTF-8 text", f"{path}:{line}", "save it as UTF-8") from error


def parse(text: str, where: str) -> dict[str, Any]:
    """TOML text as a dict.

    Raises:
        InputError: not TOML; `where` gets the line and column appended.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = re.search(r" \(at line (\d+), column (\d+)\)", message)
        line, column = (
            (int(found[1]), int(found[2])) if found else (text.count("\n") + 1, len(text.rpartition("\n")[2]) + 1)
        )
        reason = re.sub(r" \(at [^()]*\)$", "", message)
        raise InputError(
            f"not valid TOML: {reason}", f"{where}:{line}:{column}", 'strings need quotes: key = "value"'
        ) from error


def locate(text: str, key: str | Key) -> int:
    """The line (from 1) on which `key` is set in valid TOML `text`.

    `key` is dotted (`cpt.lr`) or a sequence of parts; a number counts `[[tables]]` or array elements from 0. Parsing
    ever longer beginnings of the text lets `tomllib` decide what a line means, so quoted keys, dotted keys, inline
    tables and values over several lines are all found. When `key` is not set, the line of the closest table around
    it; 1 if none.
    """
    parts: list[str | int] = [*key.split(".")] if isinstance(key, str) else [*key]
    lines = text.split("\n")
    found: dict[int, int] = {}
    start = 0  # lines before this one are complete statements
    for end in range(1, len(lines) + 1):
        try:
            data: Any = tomllib.loads("\n".join(lines[:end]) + "\n")
        except tomllib.TOMLDecodeError:
            continue
        for depth, part in enumerate(parts, start=1):
            if isinstance(data, dict) and str(part) in data:
                data = data[str(part)]
            elif isinstance(data, list) and str(part).isdigit() and int(part) < len(data):
                data = data[int(part)]
            else:
                break
            found.setdefault(depth, start + 1)
        if len(parts) in found:
            break
        start = end
    return found[max(found)] if found else 1


def validate(model: type[Model], data: dict[str, Any], text: str, where: str, what: str = "") -> Model:
    """`data`, parsed from `text`, as a `model`.

    Types are strict (`"5"` and `true` are no numbers), except that a whole float such as `2e9` may stand for an
    integer.

    Args:
        where: the file, as shown to the user.
        what: what the file is, for example "project file".

    Raises:
        InputError: every problem, one a line, each with file, line and key.
    """
    data = copy.deepcopy(data)
    while True:
        try:
            return model.model_validate(data, strict=True)
        except ValidationError as error:
            if not _whole_floats(data, error):
                found = sorted((locate(text, loc), message) for loc, message in problems(error, model))
                raise _report(found, where, what) from error


def problems(error: ValidationError, model: type[BaseModel]) -> list[tuple[tuple[str | int, ...], str]]:
    """(key, sentence) for every problem that pydantic found in a `model`."""
    return [(item["loc"], _sentence(model, item)) for item in error.errors(include_url=False)]


def write(path: Path, data: dict[str, Any]) -> None:
    """Writes `data` as TOML; the file appears complete or not at all. An `OSError` is left to the caller."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(tomli_w.dumps(data), encoding="utf-8", newline="\n")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _report(found: list[tuple[int, str]], where: str, what: str) -> InputError:
    name = what or "file"
    if len(found) == 1:
        return InputError(f"{name}: {found[0][1]}", f"{where}:{found[0][0]}")
    lines = [f"  {where}:{line}: {message}" for line, message in found]
    return InputError("\n".join([f"{len(found)} problems in the {name}:", *lines]), where)


def _whole_floats(data: Any, error: ValidationError) -> bool:
    """Replaces whole floats standing where integers belong; says whether any was replaced."""
    changed = False
    for item in error.errors(include_url=False):
        value = item["input"]
        if item["type"] != "int_type" or not isinstance(value, float) or not value.is_integer():
            continue
        target = data
        for part in item["loc"][:-1]:
            target = target[part]
        target[item["loc"][-1]] = int(value)
        changed = True
    return changed


def _sentence(model: type[BaseModel], item: Any) -> str:
    loc, kind, given, limits = item["loc"], item["type"], item["input"], item.get("ctx", {})
    key = ".".join(map(str, loc))
    if kind == "extra_forbidden":
        valid = _keys(model, loc[:-1])
        return f"unknown key '{key}'. {nearest(str(loc[-1]), valid)}".strip()
    if kind == "missing":
        return f"key '{key}' is missing"
    if kind == "value_error":
        message = str(limits.get("error", item["msg"]))
        return f"{key}: {message}" if key else message
    if kind == "literal_error":
        valid = re.findall(r"'([^']*)'", limits["expected"]) or [limits["expected"]]
        return f"{key} = {given!r} is not known. {nearest(str(given), valid)}".strip()
    bounds = {"greater_than": ("gt", "above"), "greater_than_equal": ("ge", "at least"), "less_than": ("lt", "below")}
    if kind in bounds:
        name, word = bounds[kind]
        return f"{key} must be {word} {limits[name]:g}, not {given!r}"
    kinds = {
        "int": "a whole number",
        "float": "a number",
        "string": "text in quotes",
        "bool": "true or false",
        "list": "a list",
        "dict": "a table",
        "model": "a table",
        "finite": "a finite number",
    }
    wanted = kinds.get(kind.split("_")[0])
    return f"{key} must be {wanted}, not {given!r}" if wanted else f"{key}: {item['msg']} (got {given!r})"


def _keys(model: type[BaseModel], loc: Iterable[str | int]) -> list[str]:
    """The keys allowed in the table at `loc` of a `model`."""
    here: Any = model
    for part in loc:
        if isinstance(here, type) and issubclass(here, BaseModel):
            here = next(f.annotation for name, f in here.model_fields.items() if part in (name, f.alias))
        else:  # `part` is the name of a `[data.NAME]` table or the index of a list
            here = get_args(here)[-1]
        if isinstance(here, UnionType):  # a table that may be absent
            here = next(kind for kind in get_args(here) if kind is not type(None))
    return [field.alias or name for name, field in here.model_fields.items()]
