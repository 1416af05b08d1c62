"""TOML errors point at the right place."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from infir2_core.config import toml
from infir2_core.errors import InputError

TEXT = '''# a comment with cpt.lr = 1
format = 1
note = """
lr = 3
[cpt]
"""

[project]
"odd key" = 1
a.b.c = 2
inline = { x = 1, y = { z = 2 } }

[cpt]
steps = [
  1,  # lr = 7
  2,
]
lr = 0.5

[[blend]]
prefix = "a"

[[blend]]
prefix = "b"
[data."web.x"]
weight = 1
'''


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("format", 2),
        ("note", 3),
        ("project", 8),
        (("project", "odd key"), 9),
        ("project.a.b.c", 10),
        ("project.inline.y.z", 11),
        ("cpt", 13),
        ("cpt.steps", 14),
        ("cpt.lr", 18),
        ("blend.0.prefix", 21),
        ("blend.1.prefix", 24),
        (("data", "web.x", "weight"), 26),
        ("cpt.absent", 13),
        ("absent", 1),
    ],
)
def test_locate(key: Any, line: int) -> None:
    assert toml.locate(TEXT, key) == line
    assert toml.locate(TEXT.replace("\n", "\r\n"), key) == line


names = st.text("abc. =#", min_size=1, max_size=4)
values = st.one_of(st.integers(-5, 5), st.text("ab\n[]\"='#", max_size=6), st.lists(st.integers(), max_size=3))


@given(st.dictionaries(names, st.one_of(values, st.dictionaries(names, values, min_size=1, max_size=4)), max_size=5))
def test_locate_finds_the_line_whose_removal_removes_the_key(data: dict[str, Any]) -> None:
    """Every scalar is written on one line: without that line the document no longer has the key."""
    text = tomli_w.dumps(data)
    for key, value in data.items():
        paths = [(key, inner) for inner in value] if isinstance(value, dict) else [(key,)]
        for path in paths:
            lines = text.split("\n")
            at = toml.locate(text, path) - 1
            leaf: Any = data
            for part in path:
                leaf = leaf[part]
            if isinstance(leaf, list):
                at_end = next(end for end in range(at + 1, len(lines) + 1) if _parses(lines[:end]))
            else:
                at_end = at + 1
            rest: Any = tomllib.loads("\n".join(lines[:at] + lines[at_end:]))
            for part in path[:-1]:
                rest = rest[part]
            assert path[-1] not in rest


def _parses(lines: list[str]) -> bool:
    try:
        tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "place"),
    [("a = 1\nb = = 2\n", "x.toml:2:5"), ("a = 1\na = 2\n", "x.toml:2:6"), ('a = 1\nb = "open', "x.toml:2:10")],
)
def test_syntax_errors_name_line_and_column(text: str, place: str) -> None:
    with pytest.raises(InputError) as caught:
        toml.parse(text, "x.toml")
    assert caught.value.exit_code == 3
    assert caught.value.where == place
    assert "not valid TOML" in caught.value.what and "(at" not in caught.value.what


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        toml.read_text(tmp_path / "absent.toml")
    with pytest.raises(InputError, match="directory"):
        toml.read_text(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"a = 1\nb = '\xe9'\n")
    with pytest.raises(InputError) as caught:
        toml.read_text(tmp_path / "latin.toml")
    assert caught.value.where.endswith("latin.toml:2") and "UTF-8" in caught.value.what
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert toml.parse(toml.read_text(tmp_path / "bom.toml"), "bom") == {"a": 1}


class Leaf(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    number: int = Field(0, ge=0, lt=10)
    rate: float = Field(1.0, gt=0)
    word: str = ""
    on: bool = False


class Root(BaseModel):
    model_config = ConfigDict(extra="forbid")
    named: dict[str, Leaf] = {}
    many: list[Leaf] = []
    leaf: Leaf = Leaf()
    needed: int


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("needed = 1\n[leaf]\nnumbr = 1", 3, "unknown key 'leaf.numbr'. Did you mean 'number'?"),
        ("needed = 1\n[named.x]\nwrod = 1", 3, "unknown key 'named.x.wrod'. Did you mean 'word'?"),
        ("needed = 1\n[[many]]\n[[many]]\nrat = 1", 4, "unknown key 'many.1.rat'. Did you mean 'rate'?"),
        ("neded = 1\nneeded = 1", 1, "unknown key 'neded'. Did you mean 'needed'?"),
        ("[leaf]\non = true", 1, "key 'needed' is missing"),
        ("needed = true", 1, "needed must be a whole number, not True"),
        ("needed = 2.5", 1, "needed must be a whole number, not 2.5"),
        ("needed = '3'", 1, "needed must be a whole number, not '3'"),
        ("needed = 1\nleaf = 3", 2, "leaf must be a table, not 3"),
        ("needed = 1\nleaf.number = 10", 2, "leaf.number must be below 10, not 10"),
        ("needed = 1\nleaf.number = -1", 2, "leaf.number must be at least 0, not -1"),
        ("needed = 1\nleaf.rate = 0", 2, "leaf.rate must be above 0, not 0"),
        ("needed = 1\nleaf.rate = inf", 2, "leaf.rate must be a finite number, not inf"),
        ("needed = 1\nleaf.word = 1", 2, "leaf.word must be text in quotes, not 1"),
        ("needed = 1\nleaf.on = 1", 2, "leaf.on must be true or false, not 1"),
        ("needed = 1\nmany = 1", 2, "many must be a list, not 1"),
    ],
)
def test_validate_names_line_and_key(text: str, line: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        toml.validate(Root, toml.parse(text, "x.toml"), text, "x.toml", "thing")
    assert caught.value.exit_code == 3
    assert caught.value.where == f"x.toml:{line}"
    assert caught.value.what.startswith(f"thing: {message}")


def test_validate_reports_all_problems_in_the_order_of_the_file() -> None:
    text = "leaf.rate = 0\nneeded = 1.5\nextra = 1"
    with pytest.raises(InputError) as caught:
        toml.validate(Root, toml.parse(text, "x.toml"), text, "x.toml", "thing")
    head, *lines = caught.value.what.splitlines()
    assert head == "3 problems in the thing:"
    assert [line.split(": ")[0].strip() for line in lines] == ["x.toml:1", "x.toml:2", "x.toml:3"]


def test_whole_floats_count_as_integers() -> None:
    text = "needed = 2e9\n[[many]]\nnumber = 3.0"
    root = toml.validate(Root, toml.parse(text, "x"), text, "x")
    assert root.needed == 2_000_000_000 and root.many[0].number == 3


def test_write_leaves_nothing_beside_the_file(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.toml"
    toml.write(target, {"a": 1})
    toml.write(target, {"a": 2})
    assert tomllib.loads(target.read_text()) == {"a": 2}
    target.with_name("folder").mkdir()
    with pytest.raises(OSError):
        toml.write(target.with_name("folder"), {"a": 1})
    assert sorted(p.name for p in target.parent.iterdir()) == ["a.toml", "folder"]
