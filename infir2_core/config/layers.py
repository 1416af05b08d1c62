"""Settings put together from layers: preset, project file, flags. Each value remembers the place that gave it.

Shared by the stages (resolve.py, resolve_sft.py), whose rules are their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ..errors import InputError, nearest
from .mixture import absolute
from .project import ProjectFile
from .runfile import fingerprint
from .schema import RunConfig, TrainSettings
from .toml import problems

Stage = TypeVar("Stage", bound=TrainSettings)


@dataclass(frozen=True)
class Resolved:
    """A run's settings, and what the user should know about how they came about."""

    config: RunConfig
    notes: list[str]


@dataclass
class Settings:
    """Settings of a stage under construction: each value with its place; `given` are not from the base layer."""

    values: dict[str, Any]
    origin: dict[str, str]
    given: set[str] = field(default_factory=set)

    def over(self, values: Mapping[str, Any], origin: Mapping[str, str]) -> None:
        """Puts `values`, each from its `origin`, over what is there."""
        self.values |= values
        self.origin |= {name: origin[name] for name in values}
        self.given |= set(values)

    def checked(self, kind: type[Stage], section: str = "") -> Stage:
        """The settings as `kind`.

        Args:
            section: table of the project file that an error names keys of; flags if empty.

        Raises:
            InputError: every problem, with the places that gave the values.
        """
        try:
            return kind.model_validate(self.values, strict=True)
        except ValidationError as error:
            lines = []
            for key, message in problems(error, kind):
                named = [name for name in kind.model_fields if re.search(rf"\b{name}\b", message)]
                names = [str(part) for part in key] or named
                where = ", ".join(dict.fromkeys(self.origin[name] for name in names))
                change = " or ".join(f"{section}.{name}" if section else flag(name) for name in names)
                lines.append((message, where, f"change {change}"))
            if len(lines) == 1:
                raise InputError(*lines[0]) from error
            what = "\n".join(
                [f"{len(lines)} settings are wrong:", *(f"  {where}: {message}" for message, where, _ in lines)]
            )
            raise InputError(what) from error


def layered(
    base: TrainSettings,
    origin: str,
    project: ProjectFile | None,
    section: str,
    own: dict[str, Any],
    given: dict[str, Any],
    cwd: Path,
) -> Settings:
    """Flags over project file over base.

    Args:
        base: every setting, all from the place `origin`.
        section: table of the project file, such as "cpt", that sets `own`.
        given: what flags set; relative paths count from `cwd`.
    """
    settings = Settings(base.model_dump(), dict.fromkeys(type(base).model_fields, origin))
    if project:
        if "recipe" in own:
            own["recipe"] = recipe_of(own["recipe"], project.folder, project.where(f"{section}.recipe"))
        settings.over(own, {name: project.where(f"{section}.{name}") for name in own})
    if "recipe" in given:
        given["recipe"] = recipe_of(given["recipe"], cwd, "--recipe")
    settings.over(given, {name: flag(name) for name in given})
    return settings


def named(config: RunConfig, name: str | None, root: Path, notes: list[str]) -> Resolved:
    """The run under the name it was given, or one that stands for its settings."""
    made = name or f"{config.title}-{config.size}-{Path(config.train.recipe).stem}-{fingerprint(config, root)}"
    return Resolved(config.model_copy(update={"name": made}), notes)


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def check_name(name: str | None) -> None:
    """Refuses a `--name` that cannot be a folder."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        hint = "use letters, digits, '-', '_' and '.'; --runs chooses the folder"
        raise InputError(f"'{name}' cannot name a run folder", "--name", hint)


def check_ranks(ranks: int | None) -> int:
    """The number of ranks, 1 unless given."""
    if ranks is not None and ranks < 1:
        raise InputError(f"ranks must be at least 1, not {ranks}", "--ranks", "--ranks 1")
    return 1 if ranks is None else ranks


def recipe_of(name: str, base: Path, where: str) -> str:
    """A recipe's name, or the absolute path of its file."""
    from ..precision.recipe import list_recipes

    if name.endswith(".toml"):
        path = absolute(name, base)
        if not path.is_file():
            raise InputError(f"no recipe file {path}", where, "infir2 recipes show infir2 --toml prints one")
        return str(path)
    if name not in (known := list_recipes()):
        raise InputError(f"no recipe '{name}'", where, nearest(name, known))
    return name
