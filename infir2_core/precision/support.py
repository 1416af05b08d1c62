"""Which pieces of the recipe grammar the code implements today.

The grammar (spec.py, recipe.py) is wider than the code on purpose: every published system can be written down,
compared and hashed. A recipe that needs more than is listed here is refused at plan time, by the names of the missing
pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .spec import QSpec

if TYPE_CHECKING:
    from .recipe import Recipe

FORMATS = ("e4m3", "e5m2")
SCALES = ("pow2", "fp32", "e8m0", "none")
AMAX = ("current", "delayed", "static")


def missing_pieces(recipe: Recipe) -> list[str]:
    """Names of what `recipe` needs and nothing implements, each once, in the order of the recipe."""
    found: list[str] = []
    for policy in recipe.used().values():
        for spec_name in policy.operands().values():
            spec = recipe.spec(spec_name)
            if spec is not None:
                found += _spec(spec)
            elif spec_name != recipe.compute:
                found.append(f"{spec_name} operands in a recipe that computes in {recipe.compute}")
        if policy.accumulate != "fp32":
            found.append(f"accumulation {policy.accumulate}")
    if any(recipe.spec(name) for name in recipe.policy_for("head", "head").operands().values()):
        found.append("quantised LM head")
    found += [
        f"layer rule '{rule.match}' (needs calibration)" for rule in recipe.layers if rule.match.startswith("spike:")
    ]
    for key in ("m", "v", "master", "main_grad"):
        if (value := getattr(recipe.optimizer, key)) != "fp32":
            found.append(f"optimizer.{key} = {value}")
    if recipe.optimizer.feedback != "none":
        found.append(f"optimizer.feedback = {recipe.optimizer.feedback}")
    if recipe.save.linear_input != "codes":
        found.append(f"save.linear_input = {recipe.save.linear_input}")
    found += [f"save.{k} = {v}" for k in ("norm_input", "gate_up") if (v := getattr(recipe.save, k)) != "bf16"]
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
    for policy in recipe.used().values():
        specs = {key: recipe.spec(name) for key, name in policy.operands().items()}
        pairs = [("fprop.x", "wgrad.x"), ("fprop.w", "dgrad.w"), ("dgrad.g", "wgrad.g")]
        if any(spec is not None and not spec.block_scaled for spec in specs.values()):
            return False
        if any(specs[row] != specs[col] for row, col in pairs):
            return False
        rows = [specs[key] for key in ("fprop.x", "dgrad.g", "wgrad.g")]
        if any(spec is not None and spec.block != (1, 128) for spec in rows):
            return False
    return True


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
    if spec.origin != "source":
        out.append(f"column copy from {spec.origin}")
    return out
