"""What the documents promise: commands that parse, targets and links that exist, versions that agree."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
SHELL = ("python", "python3", ".", "pip", "cd", "git", "docker", "tensorboard", "pytest", "touch", "tail", "kill")
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


def commands() -> list[tuple[str, str]]:
    """(page, line) of every line of a ```bash block, comments and continued lines joined."""
    found = []
    for page in PAGES:
        for block in re.findall(
            r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        ):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    found.append((page.name, line.strip()))
    return found


def parse(words: list[str]) -> None:
    """Parse a command line with the real parser, without running the command."""
    from infir2_cli.main import app

    command: Any = typer.main.get_command(app)
    path = "infir2"
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"no such command: {path} {' '.join(words[:1])}"
        path, command, words = f"{path} {words[0]}", command.commands[words[0]], words[1:]
    command.make_context(path, list(words))


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_in_the_documents_parses(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "infir2":
        parse(words[1:])
    elif words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
        assert [w for w in words[1:] if "=" not in w and w not in targets] == []
    else:
        assert words[0] in SHELL, line


def test_the_check_above_can_fail() -> None:
    for wrong in (["ctp"], ["init", "--siez", "tiny"], ["env"], ["init", "a", "b"]):
        with pytest.raises((AssertionError, typer.TyperException)):
            parse(wrong)


def test_the_readme_shows_the_commands_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\nmake demo\nmake test\n" in readme
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [link for link in links if link and "://" not in link and not (page.parent / link).exists()]
    named = re.findall(r"`((?:infir2_core|infir2_cli|tests|templates|docker)/[\w./-]+)`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_the_recipes_of_the_readme_are_recipes() -> None:
    from infir2_core.precision.recipe import load_recipe

    rows = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {"bf16", "infir2"} <= set(rows)
    assert [name for name in rows if load_recipe(name).missing()] == []


def test_pre_commit_runs_the_pinned_tools() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    named = dict(re.findall(r"name: (ruff|mypy)[\w ]* \(([\d.]+)\)", hooks))
    assert named == {"ruff": PINS["ruff"], "mypy": PINS["mypy"]}


def test_the_environment_has_the_pinned_tools() -> None:
    from importlib.metadata import PackageNotFoundError, version

    for tool in ("ruff", "mypy"):
        try:
            assert version(tool) == PINS[tool]
        except PackageNotFoundError:
            pytest.skip(f"{tool} is not installed here")


def test_every_dependency_is_pinned_at_a_version_it_allows() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {canonicalize_name(name): pinned for name, pinned in PINS.items()}
    for line in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), line


def test_every_import_is_a_declared_dependency() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {Requirement(line).name.replace("-", "_") for line in project["dependencies"]}
    own = {"infir2_core", "infir2_cli", "megatron"}  # megatron-core's package is called megatron
    used: dict[str, Path] = {}
    for path in [*ROOT.glob("infir2_c*/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(
            r"^\s*(?:from|import) ([a-zA-Z_]\w*)(?:[\w.]*) ?(?:import|as|$|,)", text, flags=re.MULTILINE
        ):
            used.setdefault(name, path)
    known = (
        set(sys.stdlib_module_names) | declared | own | {"triton", "flash_attn"}
    )  # the first comes with torch, the second is the extra `hopper`
    assert {name: str(path) for name, path in used.items() if name not in known} == {}


def test_the_citation_names_the_ten_authors() -> None:
    yaml = pytest.importorskip("yaml")
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["preferred-citation"]
    assert paper["url"].endswith("2509.22536")
    names = [f"{author['given-names']} {author['family-names']}" for author in paper["authors"]]
    assert len(set(names)) == 10 and names[0] == "Wenjun Wang" and names[-1] == "Hongxia Yang"


def test_docker_images_are_pinned() -> None:
    for path in (ROOT / "docker").glob("*Dockerfile"):
        text = path.read_text(encoding="utf-8")
        assert re.search(r"^FROM \S+:\d+\.\d+\.\d+\S*$", text, flags=re.MULTILINE), path.name
        assert "-c constraints.txt" in text, path.name
