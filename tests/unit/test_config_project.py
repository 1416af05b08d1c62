"""infir2.toml: what it may say, and that every mistake is named with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infir2_core.config.project import FILE, CptSection, ProjectFile, RlSection, SftSection, find_project, load_project
from infir2_core.config.schema import CptSettings, TrainSettings
from infir2_core.errors import InputError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "project-file.md"


def load(tmp_path: Path, text: str) -> ProjectFile:
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    return load_project(tmp_path / FILE)


def test_everything_at_once(tmp_path: Path) -> None:
    project = load(
        tmp_path,
        """format = 1
[project]
name = "demo"
runs = "out"
machine = "local"
[model]
size = "7b"
from = "Qwen/Qwen2.5-7B"
[data.web]
prefixes = "data/web/*"
weight = 0.7
[data.code]
prefixes = ["@list.txt", "data/code"]
[cpt]
from = "runs/earlier"
tokens = 2e9
lr = 1
recipe = "bf16"
""",
    )
    assert (project.project.name, project.project.runs) == ("demo", "out")
    assert (project.model.size, project.model.from_, project.cpt.from_) == ("7b", "Qwen/Qwen2.5-7B", "runs/earlier")
    assert {name: (section.specs, section.weight) for name, section in project.data.items()} == {
        "web": (["data/web/*"], 0.7),
        "code": (["@list.txt", "data/code"], 1.0),
    }
    assert project.cpt.tokens == 2_000_000_000
    assert project.cpt.settings() == {"lr": 1.0, "recipe": "bf16"}
    assert project.folder == tmp_path
    assert project.where("cpt.lr") == f"{tmp_path / FILE}:17: cpt.lr"


def test_a_file_of_one_line_sets_nothing(tmp_path: Path) -> None:
    project = load(tmp_path, "format = 1")
    assert project.project.runs == "runs" and project.model.size is None and project.cpt.settings() == {}


def test_the_cpt_table_takes_every_setting_with_its_limits(tmp_path: Path) -> None:
    assert set(CptSection.model_fields) == set(CptSettings.model_fields) | {"tokens", "from_"}
    limited = [name for name, field in CptSettings.model_fields.items() if field.metadata]
    assert len(limited) >= 15
    for name in limited:
        with pytest.raises(InputError, match=f"cpt.{name} must be"):
            load(tmp_path, f"format = 1\n[cpt]\n{name} = -1")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("format = 1\n[cpt]\nlearning_rte = 1", 3, "unknown key 'cpt.learning_rte'"),
        ("format = 1\n[cpt]\nwarmup_step = 1", 3, "Did you mean 'warmup_steps'?"),
        ("format = 1\n[ctp]\nlr = 1", 2, "unknown key 'ctp'. Did you mean 'cpt'?"),
        ("format = 1\n[model]\nsize = '7x'", 3, "Did you mean '7b'?"),
        ("format = 1\n[model]\nform = 'x'", 3, "Did you mean 'from'?"),
        ("format = 1\n[model]\nfrom_ = 'x'", 3, "Did you mean 'from'?"),
        ("format = 1\n[project]\nmachine = 'juwels'", 3, "only 'local' is known so far"),
        ("format = 1\n[data.web]\nprefix = 'a'\nprefixes = 'a'", 3, "Did you mean 'prefixes'?"),
        ("format = 1\n\n[data.web]\nweight = 1", 3, "key 'data.web.prefixes' is missing"),
        ("format = 1\n[data.web]\nprefixes = []", 3, "data.web.prefixes: empty"),
        ("format = 1\n[data.web]\nprefixes = 7", 3, "data.web.prefixes must be a list, not 7"),
        ("format = 1\n[data.web]\nprefixes = [7]", 3, "data.web.prefixes.0 must be text in quotes, not 7"),
        ("format = 1\n[data.web]\nprefixes = 'a'\nweight = 0", 4, "data.web.weight must be above 0"),
        ("format = 1\n[cpt]\nsteps = 0", 3, "cpt.steps must be above 0, not 0"),
        ("format = 1\n[cpt]\nsteps = '5'", 3, "cpt.steps must be a whole number"),
        ("format = 1\n[cpt]\nlr = nan", 3, "cpt.lr must be"),
        ("format = 1\n[cpt]\nbeta2 = 1.0", 3, "cpt.beta2 must be below 1"),
        ("format = 1\n[cpt]\nschedule = 'linear'", 3, "Valid: constant, cosine, wsd."),
        ("format = 1\n[cpt]\nrecompute = 'ful'", 3, "Did you mean 'full'?"),
        ("format = 1\n[cpt]\nrecipe = 'infr2'", 3, "no recipe 'infr2'"),
        ("format = 1\n[cpt]\nrecipe = 'absent.toml'", 3, "no recipe 'absent.toml'"),
        ("format = 1\n[cpt]\nsteps = 5\ntokens = 5", 2, "steps and tokens both say how long to train"),
        ("format = 2", 1, "format 2 is unknown"),
        ("[cpt]\nlr = 1", 1, "no format number"),
        ("format = 1\n[cpt]\nlr = = 1", 3, "not valid TOML"),
    ],
)
def test_each_mistake_is_exit_3_with_file_line_and_key(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    assert caught.value.exit_code == 3
    assert re.match(rf"{re.escape(str(tmp_path / FILE))}:{line}\b", caught.value.where), caught.value.where
    assert words in str(caught.value)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, "format = 1\n[model]\nsize = '8b'\n[cpt]\nlr = -1\nsteps = 'x'\n")
    assert [int(n) for n in re.findall(r"toml:(\d+):", caught.value.what)] == [3, 5, 6]
    assert "pydantic" not in str(caught.value)


def test_a_misspelt_recipe_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, "format = 1\n[cpt]\nrecipe = 'infir-2'")
    assert "Did you mean 'infir2'?" in caught.value.hint


def test_a_recipe_of_ones_own_is_found_beside_the_project(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("")
    assert load(tmp_path, "format = 1\n[cpt]\nrecipe = 'mine.toml'").cpt.settings()["recipe"] == "mine.toml"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_project(tmp_path / FILE)


def test_the_closest_project_above_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert find_project(inner) is None
    (tmp_path / FILE).write_text("format = 1")
    assert find_project(inner) == tmp_path / FILE
    (tmp_path / "a" / FILE).write_text("format = 1")
    assert find_project(inner) == tmp_path / "a" / FILE
    (inner / FILE).mkdir()
    assert find_project(inner) == tmp_path / "a" / FILE


def test_examples_of_the_documentation_load(tmp_path: Path) -> None:
    page = DOCS.read_text(encoding="utf-8")
    examples = re.findall(r"^```toml\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        load(tmp_path, example)


def test_the_documentation_tells_every_key() -> None:
    page = DOCS.read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([\w.]+)`", page, flags=re.MULTILINE))
    keys = {f"cpt.{f.alias or name}" for name, f in CptSection.model_fields.items()}
    shared = set(TrainSettings.model_fields)
    keys |= {f"sft.N.{f.alias or name}" for name, f in SftSection.model_fields.items() if name not in shared}
    keys |= {f"rl.N.{f.alias or name}" for name, f in RlSection.model_fields.items() if name not in shared}
    keys |= {"format", "project.name", "project.runs", "project.machine", "model.size", "model.from"}
    assert documented == keys | {"data.NAME.prefixes", "data.NAME.weight"}
    for stage in ("sft", "rl"):
        opening = rf"^`\[{stage}.1\]` and `\[{stage}.2\]` hold.*?(?=^\|)"
        paragraph = re.search(opening, page, flags=re.MULTILINE | re.DOTALL)
        assert paragraph and shared <= set(re.findall(r"`(\w+)`", paragraph[0]))
