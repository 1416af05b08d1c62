"""Which pieces of the recipe grammar the code implements today.

The grammar (spec.py, recipe.py) is wider than the code on purpose: every published system can be written down,
compared and hashed. A recipe that needs more than is listed here is refused at plan time, by the names of the missing
pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .spec import QSpec

if TYPE_CHECKING:
    from .recipe import Policy, Recipe

FORMATS = ("e4m3", "e5m2")
SCALES = ("pow2", "fp32", "e8m0", "none")
AMAX = ("current", "delayed", "static")


def missing_pieces(recipe: Recipe) -> list[str]:
    """Names of what `recipe` needs and nothing implements, each once, in the order of the recipe."""
    found: list[str] = []
    for policy in recipe.used().values():
        for operand, spec_name in policy.operands().items():
            spec = recipe.spec(spec_name)
            if spec is not None:
                found += _spec(spec) + _origin(spec, operand, recipe.spec(policy.fprop.x))
            elif spec_name != recipe.compute:
                found.append(f"{spec_name} operands in a recipe that computes in {recipe.compute}")
        if policy.accumulate != "fp32":
            found.append(f"accumulation {policy.accumulate}")
    for name in recipe.policy_for("head", "head").operands().values():
        spec = recipe.spec(name)
        if spec is not None and not _in_chunks(spec):
            found.append(f"LM head in {spec.label()}")
    found += [
        f"layer rule '{rule.match}' (needs calibration)" for rule in recipe.layers if rule.match.startswith("spike:")
    ]
    found += _optimizer(recipe)
    if recipe.optimizer.feedback != "none":
        found.append(f"optimizer.feedback = {recipe.optimizer.feedback}")
    if recipe.save.linear_input != "codes":
        found.append(f"save.linear_input = {recipe.save.linear_input}")
    if recipe.save.norm_input != "bf16":
        found.append(f"save.norm_input = {recipe.save.norm_input}")
    if recipe.save.gate_up != "bf16":
        found += _saved(recipe, "gate_up", recipe.save.gate_up)
    if recipe.comm.param_gather not in ("bf16", "fp32") or recipe.comm.grad_reduce != "fp32":
        found.append(f"comm = {recipe.comm.param_gather}, {recipe.comm.grad_reduce}")
    if recipe.phases:
        found.append("phases")
    found += [f"system.{key} = {value}" for key, value in recipe.system.items()]
    return list(dict.fromkeys(found))


def block_scaled(recipe: Recipe) -> bool:
    """Whether every GEMM that the recipe quantises has a Hopper kernel: 1x128 against 1x128 or 128x128 blocks.

    (For token counts that divide by 128; other shapes run by reference.)
    """
    return all(_policy_block_scaled(recipe, policy) for policy in recipe.used().values())


def _policy_block_scaled(recipe: Recipe, policy: Policy) -> bool:
    specs = {key: recipe.spec(name) for key, name in policy.operands().items()}
    given = [spec for spec in specs.values() if spec is not None]
    x, wgrad_x, wgrad_g = specs["fprop.x"], specs["wgrad.x"], specs["wgrad.g"]
    if wgrad_x is not None and wgrad_x.shifts_from(x):
        given.remove(wgrad_x)
        if wgrad_x.block not in ((1, 128), (128, 128)):
            return False
    if any(not spec.block_scaled for spec in given) or len({(spec.format, spec.scale) for spec in given}) > 1:
        return False
    if any(spec is not None and spec.block != (1, 128) for spec in (x, specs["dgrad.g"])):
        return False
    if specs["fprop.w"] != specs["dgrad.w"] or not any(s is None or s.block == (1, 128) for s in (wgrad_x, wgrad_g)):
        return False
    return all(
        (specs[row] is None) == (specs[col] is None) for row, col in (("fprop.x", "wgrad.x"), ("dgrad.g", "wgrad.g"))
    )


def _optimizer(recipe: Recipe) -> list[str]:
    """What ops/reference/moments.py and model/gradients.py do not hold."""
    found = []
    for key in ("m", "v"):
        name = getattr(recipe.optimizer, key)
        if name in ("fp32", "bf16"):
            continue
        if (spec := recipe.specs.get(name)) is None:
            found.append(f"optimizer.{key} = {name}")
        else:
            found += [f"optimizer.{key} in {piece}" for piece in _moment(spec, positive=key == "v")]
    if recipe.optimizer.master not in ("fp32", "split"):
        found.append(f"optimizer.master = {recipe.optimizer.master}")
    if recipe.optimizer.master == "split" and recipe.compute != "bf16":
        found.append(f"a split master in a recipe that computes in {recipe.compute}")
    if recipe.optimizer.main_grad not in ("fp32", "bf16"):
        found.append(f"optimizer.main_grad = {recipe.optimizer.main_grad}")
    return found


def _moment(spec: QSpec, positive: bool) -> list[str]:
    out = []
    if spec.format != "e4m3":
        out.append(f"format {spec.format}")
    if spec.block != (1, 128):
        out.append(f"blocks of {spec.block}")
    if spec.scale != "fp32" or spec.headroom != 1.0:
        out.append(f"scale {spec.scale}")
    if spec.amax != "current":
        out.append(f"amax {spec.amax}")
    if spec.rounding != "stochastic":
        out.append(f"{spec.rounding} rounding")
    if spec.transforms and not (positive and spec.root and len(spec.transforms) == 1):
        out += [f"transform {t.kind}" + (f" {t.exponent}" if t.exponent else "") for t in spec.transforms]
    return out


def _saved(recipe: Recipe, key: str, name: str) -> list[str]:
    """Whether backward can keep a tensor in codes of this spec: blocks of its rows, from the tensor alone."""
    spec = recipe.specs.get(name)
    if spec is None:
        return [f"save.{key} = {name}"]
    rows = spec.block == "row" or (not isinstance(spec.block, str) and spec.block[0] == 1)
    if _spec(spec) or spec.origin != "source" or not rows or spec.amax != "current":
        return [f"save.{key} in {spec.label()}"]
    return []


def _in_chunks(spec: QSpec) -> bool:
    """Whether chunks of a multiple of 128 tokens can be quantised one by one (ops/loss.py)."""
    return not isinstance(spec.block, str) and all(128 % side == 0 for side in spec.block) and spec.amax == "current"


def _spec(spec: QSpec) -> list[str]:
    out = []
    if spec.format not in FORMATS:
        out.append(f"format {spec.format}")
    if spec.scale not in SCALES:
        out.append(f"scale {spec.scale}")
    if spec.amax not in AMAX:
        out.append(f"amax {spec.amax}")
    if spec.amax != "current" and spec.block != "tensor":
        out.append(f"amax {spec.amax} with block {spec.block}")
    if spec.rounding != "rne":
        out.append(f"{spec.rounding} rounding")
    if spec.clip != "saturate":
        out.append(f"clip {spec.clip}")
    out += [f"transform {t.kind}" for t in spec.transforms]
    return out


def _origin(spec: QSpec, operand: str, fprop_x: QSpec | None) -> list[str]:
    if spec.origin == "source" or (operand == "wgrad.x" and spec.shifts_from(fprop_x)):
        return []
    if spec.origin == "codes_shift" and operand == "wgrad.x":
        return [f"column copy {spec.label()} of {fprop_x.label() if fprop_x else 'x unquantised'}"]
    return [f"column copy from {spec.origin}"]
