"""The project file, infir2.toml: what a user says once instead of on every command line.

It overrides the preset of the chosen size and is overridden by flags (resolve.py does the merging). Every table refuses
unknown keys, and a mistake is reported with its line and the closest valid name. Relative paths in it count from the
folder the file is in, so commands may be typed in any folder below.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PrivateAttr, create_model, field_validator, model_validator

from ..errors import InputError, nearest
from . import toml
from .rl import RlSettings, RlStage
from .schema import CptSettings, SftSettings, SftStage, Size, Strict

FILE = "infir2.toml"


class ProjectSection(Strict):
    """[project]: its name, the folder runs are kept in, and the machine to run on."""

    name: str = ""
    runs: str = Field("runs", min_length=1)
    machine: str = "local"

    @field_validator("machine")
    @classmethod
    def _known(cls, machine: str) -> str:
        if machine != "local":
            raise ValueError(f"machine '{machine}' is not known; only 'local' is known so far")
        return machine


class ModelSection(Strict):
    """[model]: the size, and where its weights come from (hub id, HF folder, run or checkpoint)."""

    size: Size | None = None
    from_: str = Field("", alias="from")


class DataSection(Strict):
    """[data.NAME]: one corpus. `prefixes` is a `.bin/.idx` prefix, a glob, `@list.txt`, or a list of those.

    `weight` is the corpus's share of the mixture, spread over its prefixes by their tokens.
    """

    specs: list[str] = Field(alias="prefixes")
    weight: float = Field(1.0, gt=0)

    @field_validator("specs", mode="before")
    @classmethod
    def _listed(cls, prefixes: Any) -> Any:
        if not prefixes or (isinstance(prefixes, list) and "" in prefixes):
            raise ValueError("empty; give a prefix, a glob or '@list.txt'")
        return [prefixes] if isinstance(prefixes, str) else prefixes


class _Stage(Strict):
    from_: str = Field("", alias="from")

    def settings(self) -> dict[str, Any]:
        """The settings of the stage that the file sets, by name."""
        own = self.model_dump(exclude={"tokens", "data", "eval_data", "tokenizer", "from_"})
        return {name: value for name, value in own.items() if value is not None}


class _CptBase(_Stage):
    tokens: Annotated[int, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_length(self) -> _CptBase:
        if self.tokens is not None and self.settings().get("steps") is not None:
            raise ValueError("steps and tokens both say how long to train; keep one of them")
        return self


class _SftBase(_Stage):
    data: str = ""
    tokenizer: str = ""


class _RlBase(_SftBase):
    eval_data: dict[str, str] = Field(default_factory=dict)


def _optional(kind: type[Strict]) -> dict[str, Any]:
    """The fields of `kind`, their limits kept, each of which may also be left out."""
    made: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        own: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        made[name] = (own | None, None)
    return made


if TYPE_CHECKING:
    CptSection = _CptBase
    SftSection = _SftBase
    RlSection = _RlBase
else:
    CptSection = create_model(
        "CptSection",
        __base__=_CptBase,
        __doc__="[cpt]: any of `CptSettings`, and `tokens` (a length in tokens instead of steps) and `from`.",
        **_optional(CptSettings),
    )
    SftSection = create_model(
        "SftSection",
        __base__=_SftBase,
        __doc__="[sft.1], [sft.2]: any of `SftSettings`, and `data`, `tokenizer` and `from`.",
        **_optional(SftSettings),
    )
    RlSection = create_model(
        "RlSection",
        __base__=_RlBase,
        __doc__="[rl.1], [rl.2]: any of `RlSettings`, and `data`, `eval_data` (files by name), `tokenizer` and `from`.",
        **_optional(RlSettings),
    )


class ProjectFile(Strict):
    """A whole infir2.toml."""

    format: Literal[1]
    project: ProjectSection = Field(default_factory=lambda: ProjectSection.model_validate({}))
    model: ModelSection = Field(default_factory=lambda: ModelSection.model_validate({}))
    data: dict[str, DataSection] = Field(default_factory=dict)
    cpt: CptSection = Field(default_factory=lambda: CptSection.model_validate({}))
    sft: dict[SftStage, SftSection] = Field(default_factory=dict)
    rl: dict[RlStage, RlSection] = Field(default_factory=dict)
    _path: Path = PrivateAttr(default=Path(FILE))
    _text: str = PrivateAttr(default="")

    @property
    def path(self) -> Path:
        """The file this was read from, absolute."""
        return self._path

    @property
    def folder(self) -> Path:
        """The folder that relative paths count from."""
        return self._path.parent

    def where(self, key: str) -> str:
        """`FILE:LINE: key`, for errors found after the file was read."""
        return f"{self._path}:{toml.locate(self._text, key)}: {key}"


def find_project(start: Path) -> Path | None:
    """The infir2.toml in `start` or the closest folder above it."""
    here = start.absolute()
    return next((folder / FILE for folder in (here, *here.parents) if (folder / FILE).is_file()), None)


def load_project(path: Path) -> ProjectFile:
    """Reads a project file.

    Raises:
        InputError: missing or unreadable, not TOML, or wrong keys and values: all of them at once, each with its line.
    """
    text = toml.read_text(path)
    data = toml.parse(text, str(path))
    if "format" not in data:
        raise InputError("the project file has no format number", f"{path}:1", "begin it with: format = 1")
    if data["format"] != 1:
        place = f"{path}:{toml.locate(text, 'format')}"
        raise InputError(
            f"project file format {data['format']!r} is unknown; this version reads format 1", place, "format = 1"
        )
    project = toml.validate(ProjectFile, data, text, str(path), "project file")
    project._path, project._text = path.absolute(), text
    _check_recipe(project)
    _check_rl(project)
    return project


def _check_recipe(project: ProjectFile) -> None:
    from ..precision.recipe import list_recipes

    stages: dict[str, _Stage] = {"cpt": project.cpt} | {f"sft.{stage}": own for stage, own in project.sft.items()}
    stages |= {f"rl.{stage}": own for stage, own in project.rl.items()}
    for name, section in stages.items():
        recipe, known = section.settings().get("recipe"), list_recipes()
        if recipe is None or (recipe.endswith(".toml") and (project.folder / recipe).is_file()):
            continue
        if recipe not in known:
            raise InputError(f"no recipe '{recipe}'", project.where(f"{name}.recipe"), nearest(recipe, known))


def _check_rl(project: ProjectFile) -> None:
    """No command resolves these settings, so they are checked against each other here, where the file names a size."""
    from .layers import layered
    from .presets import load_preset

    size = project.model.size
    for stage, section in project.rl.items() if size else ():
        base, key = load_preset(str(size)).rl[stage], f"rl.{stage}"
        settings = layered(base, f"preset {size}", project, key, section.settings(), {}, project.folder)
        settings.checked(RlSettings, key)
