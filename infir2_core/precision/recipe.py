"""A low-precision recipe as data: which operand of which GEMM of which layer gets which `QSpec`.

A recipe is one TOML file in recipes/ (or a path given by the user). It names its specs, groups them into policies
(what the three GEMMs of a linear use), and assigns policies to layers by ordered rules, of which the first match
wins. It also says what optimizer state, saved activations, communication and rollout use. `missing()` tells which
pieces no code here implements yet, so that a plan is refused before it starts. No arithmetic, no torch.

    fprop  y = x . w^T      contraction over input features
    dgrad  dx = g . w       contraction over output features
    wgrad  dw = g^T . x     contraction over tokens
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from ..errors import InputError, nearest
from .spec import Data, QSpec

FOLDER = Path(__file__).parent / "recipes"
HIGH = ("bf16", "fp32")  # operand names that mean "not quantised"
ROLES = ("embedding", "qkv", "attention", "o", "gate_up", "down", "norm", "head")
LINEARS = ("qkv", "o", "gate_up", "down", "head")


class Fprop(Data):
    """Specs of y = x . w^T by name."""

    x: str
    w: str


class Dgrad(Data):
    """Specs of dx = g . w by name."""

    g: str
    w: str


class Wgrad(Data):
    """Specs of dw = g^T . x by name."""

    g: str
    x: str


class Policy(Data):
    """What the three GEMMs of a linear layer use. Operand names refer to `Recipe.specs`, or are `bf16` / `fp32`."""

    fprop: Fprop
    dgrad: Dgrad
    wgrad: Wgrad
    accumulate: str = "fp32"  # fp32 | promote(128) | bits(n)

    def operands(self) -> dict[str, str]:
        """`{"fprop.x": name, ...}` in the order people read them."""
        return {
            "fprop.x": self.fprop.x,
            "fprop.w": self.fprop.w,
            "dgrad.g": self.dgrad.g,
            "dgrad.w": self.dgrad.w,
            "wgrad.g": self.wgrad.g,
            "wgrad.x": self.wgrad.x,
        }


def plain(name: str) -> Policy:
    """The policy whose operands are all `name` (`bf16` or `fp32`)."""
    return Policy(fprop=Fprop(x=name, w=name), dgrad=Dgrad(g=name, w=name), wgrad=Wgrad(g=name, x=name))


class Rule(Data):
    """Layers that `match` use a policy.

    `match` is a role (`head`, `down`, ...), a glob over module names (`layers.*.down`), `first:N` or `last:N` blocks,
    or `spike:TAU` (layers whose calibrated activation amax exceeds TAU times the median; needs calibration).
    """

    match: str
    use: str

    @field_validator("match")
    @classmethod
    def _counts(cls, match: str) -> str:
        kind, _, value = match.partition(":")
        if kind in ("first", "last") and value and not value.isdigit():
            raise ValueError(f"match = '{match}': a number of blocks must follow {kind}:")
        return match

    def hits(self, name: str, role: str, index: int | None, layers: int) -> bool:
        """Whether the layer called `name` with `role`, in block `index` (None outside the stack) of `layers`,
        matches.
        """
        kind, _, value = self.match.partition(":")
        if kind == "first" and value:
            return index is not None and index < int(value)
        if kind == "last" and value:
            return index is not None and index >= layers - int(value)
        return self.match == role or fnmatch.fnmatchcase(name, self.match)


class Optimizer(Data):
    """Formats of what the optimizer keeps: a dtype (`fp32`, `bf16`), a spec name, or `absent`."""

    m: str = "fp32"
    v: str = "fp32"
    master: str = "fp32"
    main_grad: str = "fp32"
    feedback: Literal["none", "eco"] = "none"


class Save(Data):
    """What backward keeps. `linear_input`: `codes` (the wgrad copy, or the codes that it is made of) or bf16;
    `norm_input` and `gate_up`: bf16 or a spec name. `norm_output`: `kept` as `linear_input` says, or `rebuilt` from the
    norm's input, bit for bit.
    """

    linear_input: str = "codes"
    norm_input: str = "bf16"
    norm_output: Literal["kept", "rebuilt"] = "kept"
    gate_up: str = "bf16"


class Comm(Data):
    """What travels between ranks."""

    param_gather: str = "bf16"
    grad_reduce: str = "fp32"


class Rollout(Data):
    """How RL samples: the same forward pass as training, or another; which correction the trainer applies."""

    forward: str = "same"
    kv: str = "bf16"
    sync: Literal["bytes", "requantise"] = "bytes"
    correction: str = "none"  # none | tis(C) | icepop


class Phase(Data):
    """Up to a step or a fraction of the run, layers use another policy (NVFP4's late switch)."""

    until: float
    use: str


class Recipe(Data):
    """A whole recipe. `hash` identifies its numerics: name, description and what only moves memory do not enter."""

    format: Literal[1] = 1
    name: str
    description: str
    compute: Literal["bf16", "fp32"] = "bf16"
    specs: dict[str, QSpec] = Field(default_factory=dict)
    policy: dict[str, Policy]
    layers: tuple[Rule, ...] = ()
    optimizer: Optimizer = Optimizer()
    save: Save = Save()
    comm: Comm = Comm()
    rollout: Rollout = Rollout()
    phases: tuple[Phase, ...] = ()
    system: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if "default" not in self.policy:
            raise ValueError("policy.default is missing")
        known = set(self.specs) | set(HIGH)
        for policy_name, policy in self.policy.items():
            for operand, spec in policy.operands().items():
                if spec not in known:
                    raise ValueError(f"policy.{policy_name}.{operand} = '{spec}': no such spec. {nearest(spec, known)}")
        policies = set(self.policy) | set(HIGH)
        for use in self._uses():
            if use not in policies:
                raise ValueError(f"use = '{use}': no such policy. {nearest(use, policies)}")
        return self

    @property
    def hash(self) -> str:
        """12 hexadecimal digits over everything that changes numbers."""
        data = self.model_dump(mode="json", by_alias=True, exclude={"name", "description"})
        del data["save"]["norm_output"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def uses_fp8(self) -> bool:
        """Whether any GEMM operand of any policy in use is quantised."""
        return any(name in self.specs for policy in self.used().values() for name in policy.operands().values())

    def spec(self, name: str) -> QSpec | None:
        """The spec called `name`; None for `bf16` and `fp32`."""
        return None if name in HIGH else self.specs[name]

    def policy_for(self, name: str, role: str, index: int | None = None, layers: int = 0) -> Policy:
        """The policy of one linear layer.

        Args:
            name: dotted module name, for example `layers.3.down`.
            role: one of `ROLES`.
            index: block number, None for the head.
            layers: number of blocks in the model.
        """
        for rule in self.layers:
            if rule.hits(name, role, index, layers):
                return self._policy(rule.use)
        return self.policy["default"]

    def _policy(self, name: str) -> Policy:
        return plain(name) if name in HIGH else self.policy[name]

    def used(self) -> dict[str, Policy]:
        """Every policy that some layer may get, by name."""
        return {name: self._policy(name) for name in ["default", *self._uses()]}

    def _uses(self) -> list[str]:
        return [rule.use for rule in self.layers] + [phase.use for phase in self.phases]

    def missing(self) -> list[str]:
        """Pieces of this recipe that no code here implements; empty when it can run."""
        from .support import missing_pieces

        return missing_pieces(self)

    def to_toml(self) -> str:
        """TOML text that `parse` turns back into an equal recipe."""
        return tomli_w.dumps(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    def to_json(self) -> str:
        """Canonical JSON, as stored in run folders and checkpoints."""
        return json.dumps(
            self.model_dump(mode="json", by_alias=True, exclude_none=True) | {"hash": self.hash}, indent=1
        )


def parse(text: str, where: str) -> Recipe:
    """A recipe from TOML text.

    Raises:
        InputError: not TOML, an unknown key, or a name that refers to nothing; `where` is shown.
    """
    try:
        return Recipe.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the recipe is not valid TOML: {error}", where) from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"recipe key '{key}': {first['msg']}", where, "infir2 recipes show infir2 prints a valid one"
        ) from error


def list_recipes() -> list[str]:
    """Names of the recipes that ship with infir2, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def load_recipe(name: str) -> Recipe:
    """A shipped recipe by name, or any recipe by the path of its TOML file.

    Raises:
        InputError: no such recipe (with the nearest name), or a broken file.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise InputError(f"no recipe '{name}'", "--recipe", nearest(name, list_recipes()))
    return parse(path.read_text(encoding="utf-8"), str(path))


def from_json(data: dict[str, Any], where: str) -> Recipe:
    """The recipe stored in a run folder or checkpoint; refuses one whose hash does not fit its content."""
    content = {key: value for key, value in data.items() if key != "hash"}
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise InputError(f"the stored recipe cannot be read: {error.errors()[0]['msg']}", where) from error
    if "hash" in data and data["hash"] != recipe.hash:
        raise InputError(f"the stored recipe was changed by hand (hash {recipe.hash}, recorded {data['hash']})", where)
    return recipe
