"""What an FP8 cast will do, decided before it starts: which weights, which scale rule, which files, what loaders mind.

Only the linear layers of the decoder blocks are cast. Embedding, head, norms and biases stay as they are, and so do
layers that the user keeps or that the source's recipe trained without quantising.
"""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config.schema import ModelShape
from ..errors import InputError, UsageError
from ..precision.recipe import Recipe, from_json
from ..precision.spec import QSpec
from .folder import FLOATS, SCALE, HFFolder, grid, left_out, tensor_shapes
from .safefile import Entry

# HF module -> the role that recipes know it by. Loaders fuse the members of a role.
ROLES = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.down_proj": "down",
}
SCALE_FMTS = ("ue8m0",)
MAX_BLOCK = 1024  # rows or columns; strips are whole blocks, so a larger one would need the memory of whole weights
LARGEST_SCALE = torch.finfo(torch.float32).max / 448  # of a code of E4M3's largest value that is finite in float32
TESTED = {"ue8m0": ("transformers 5.17, dequantising on a CPU",)}


@dataclass(frozen=True)
class Rule:
    """The scale rule of a cast and where it comes from."""

    spec: QSpec
    why: str


@dataclass(frozen=True)
class CastPlan:
    """What will be cast and how.

    `cast` are tensor names; `kept` maps the modules left alone to the reason; `notes` is for the user.
    """

    source: HFFolder
    rule: Rule
    block: tuple[int, int]
    scale_fmt: str
    cast: tuple[str, ...]
    kept: dict[str, str]
    notes: list[str] = field(default_factory=list)

    @property
    def input_bytes(self) -> int:
        """Bytes of tensors that are read."""
        return sum(entry.nbytes for entry in self.source.entries.values())

    @property
    def output_bytes(self) -> int:
        """Bytes of tensors and side files that are written."""
        total = sum((self.source.path / file).stat().st_size for file in self.source.side_files())
        for name, entry in self.source.entries.items():
            total += entry.nbytes
            if name in self._cast:
                rows, columns = grid(entry.shape, self.block)
                total += entry.shape[0] * entry.shape[1] + 4 * rows * columns - entry.nbytes
        return total

    @property
    def _cast(self) -> frozenset[str]:
        return frozenset(self.cast)

    def quantization_config(self) -> dict[str, Any]:
        """The block of config.json that loaders read."""
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": ["lm_head", *(name for name in self.kept if name != "lm_head")],
        }
        if self.scale_fmt:
            config["scale_fmt"] = self.scale_fmt
        return config

    def as_dict(self) -> dict[str, Any]:
        """For `--json`, and for the identity of an unfinished output."""
        return {
            "source": str(self.source.path),
            "rule": self.rule.spec.scale,
            "why": self.rule.why,
            "cast": len(self.cast),
            "kept": self.kept,
            "quantization_config": self.quantization_config(),
            "shards": list(self.source.shards),
            "left_out": left_out(self.source.path),
            "side_files": [str(file) for file in self.source.side_files()],
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "notes": self.notes,
        }


def plan_cast(
    source: HFFolder,
    pow2: bool | None = None,
    block: tuple[int, int] = (128, 128),
    keep: tuple[str, ...] = (),
    scale_fmt: str = "",
) -> CastPlan:
    """Decides what a cast of `source` does.

    Args:
        pow2: power-of-two scales; None: as the source's recipe.json trained its weights, else float32 scales.
        block: rows and columns that share a scale, 1 to `MAX_BLOCK` each.
        keep: globs over modules (`model.layers.0.*`) that stay as they are.
        scale_fmt: `ue8m0` to declare power-of-two scales in config.json; empty declares nothing.

    Raises:
        InputError: the source is quantised already or has a linear weight of another dtype than bf16, fp16, fp32.
        UsageError: a block of no or of too many rows or columns, a glob that matches nothing or only a part of what
            loaders fuse, ue8m0 without power-of-two scales.
    """
    if not all(1 <= extent <= MAX_BLOCK for extent in block):
        what = f"blocks have 1 to {MAX_BLOCK} rows and columns, not {block[0]}x{block[1]}"
        raise UsageError(what, "--block", "--block 128,128")
    if source.quantization or any(name.endswith(SCALE) for name in source.entries):
        method = source.quantization.get("quant_method", "fp8")
        raise InputError(f"the model is quantised already ({method})", str(source.path), "cast the bf16 model instead")
    for name, entry in source.entries.items():
        if entry.dtype not in FLOATS:
            what = f"'{name}' has dtype {entry.dtype}, expected bf16, fp16 or fp32"
            raise InputError(what, str(entry.file), "cast the bf16 model instead")
    recipe = read_recipe(source.path)
    rule = _rule(recipe, pow2, block, source.shape)
    if scale_fmt and scale_fmt not in SCALE_FMTS:
        raise UsageError(f"scale format '{scale_fmt}' is not known", "--scale-fmt", f"Valid: {', '.join(SCALE_FMTS)}.")
    if scale_fmt and rule.spec.scale != "pow2":
        raise UsageError(f"{scale_fmt} declares power-of-two scales", "--scale-fmt", "add --pow2-scale")
    modules = {name.removesuffix(".weight"): role for name, role in _linears(source.shape).items()}
    kept = _kept(modules, keep) | _unquantised(modules, recipe, source.shape)
    cast = tuple(f"{module}.weight" for module in modules if module not in kept)
    others = [name.removesuffix(".weight") for name in source.entries if name == "lm_head.weight"]
    reasons = {name: "head" for name in others or ["lm_head"]} | kept
    plan = CastPlan(source, rule, block, scale_fmt, cast, reasons)
    plan.notes.extend(_notes(plan))
    return plan


def read_recipe(folder: Path) -> Recipe | None:
    """The recipe that a model folder or run folder carries; None without a recipe.json.

    Raises:
        InputError: recipe.json is damaged or was changed by hand.
    """
    path = folder / "recipe.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"the recipe cannot be read: {error}", str(path), "remove it, or copy it again") from error
    if not isinstance(content, dict):
        raise InputError("the recipe is not an object", str(path), "remove it, or copy it again")
    return from_json(content, str(path))


def weight_spec(recipe: Recipe, role: str, index: int, layers: int) -> QSpec | None:
    """How a recipe quantises the forward weight of a linear of block `index`; None: not at all."""
    return recipe.spec(recipe.policy_for(f"layers.{index}.{role}", role, index, layers).fprop.w)


def _linears(shape: ModelShape) -> dict[str, str]:
    """Weight name -> role, of every linear of the blocks."""
    found = {}
    for name in tensor_shapes(shape):
        match = re.fullmatch(r"model\.layers\.\d+\.(.+)\.weight", name)
        if match and match[1] in ROLES:
            found[name] = ROLES[match[1]]
    return found


def _rule(recipe: Recipe | None, pow2: bool | None, block: tuple[int, int], shape: ModelShape) -> Rule:
    def spec(scale: Any) -> QSpec:
        return QSpec.model_validate({"format": "e4m3", "block": block, "scale": scale})

    if pow2 is not None:
        return Rule(spec("pow2" if pow2 else "fp32"), "--pow2-scale" if pow2 else "--no-pow2-scale")
    if recipe is None:
        return Rule(spec("fp32"), "the source has no recipe.json")
    used = {weight_spec(recipe, role, i, shape.layers) for role in set(ROLES.values()) for i in range(shape.layers)}
    trained = sorted({s.scale for s in used if s is not None and s.block_scaled and s.block == (128, 128)})
    if len(trained) == 1 and all(s is None or s.block_scaled for s in used):
        return Rule(spec(trained[0]), f"as recipe {recipe.name} trained it")
    kinds = ", ".join(sorted(s.label() for s in used if s is not None)) or "unquantised"
    return Rule(spec("fp32"), f"recipe {recipe.name} trained its weights {kinds}, which is no rule for block FP8")


def _kept(modules: dict[str, str], keep: tuple[str, ...]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for glob in keep:
        hits = [m for m in modules if fnmatch.fnmatchcase(m, glob) or fnmatch.fnmatchcase(f"{m}.weight", glob)]
        if not hits:
            raise UsageError(f"--keep {glob} matches no linear layer", "--keep", "such as 'model.layers.0.*'")
        kept |= dict.fromkeys(hits, f"--keep {glob}")
    for module in kept:
        block, role = module.rsplit(".", 2)[0], modules[module]
        missing = [m for m, r in modules.items() if r == role and m.startswith(f"{block}.") and m not in kept]
        if missing:
            what = f"--keep leaves {module} alone but not {', '.join(missing)}, which vLLM and SGLang fuse with it"
            raise UsageError(what, "--keep", f"add --keep '{missing[0]}'")
    return kept


def _unquantised(modules: dict[str, str], recipe: Recipe | None, shape: ModelShape) -> dict[str, str]:
    """Blocks that the source's FP8 recipe left alone stay alone: they never saw quantised weights."""
    if recipe is None or not recipe.uses_fp8:
        return {}
    found = {}
    for module, role in modules.items():
        index = int(module.split(".")[2])
        if weight_spec(recipe, role, index, shape.layers) is None:
            found[module] = f"not quantised by recipe {recipe.name}"
    return found


def uneven_note(entries: list[Entry], block: tuple[int, int]) -> list[str]:
    """A warning of quantised weights that whole blocks do not fill; none when blocks fill all of them."""
    height, width = block
    uneven = [e.name for e in entries if len(e.shape) == 2 and (e.shape[0] % height or e.shape[1] % width)]
    if not uneven:
        return []
    what = f"{len(uneven)} weights have a dimension that {height}x{width} blocks do not divide (such as {uneven[0]}): "
    return [what + "transformers does not dequantise those, and SGLang and vLLM refuse them"]


def _notes(plan: CastPlan) -> list[str]:
    shape = plan.source.shape
    notes = [f"scales: {'powers of two' if plan.rule.spec.scale == 'pow2' else 'float32'} ({plan.rule.why})"]
    entries = [plan.source.entries[name] for name in plan.cast]
    notes += uneven_note(entries, plan.block)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if plan.rule.spec.scale == "pow2" and plan.block == (128, 128) and (q % 128 or kv % 128 or shape.ffn % 128):
        notes.append("q, k, v or gate, up do not end on a block: training quantised them as one, with other blocks")
    if any(e.dtype.itemsize == 4 or e.dtype.is_floating_point and str(e.dtype) == "torch.float16" for e in entries):
        notes.append("fp32 and fp16 weights are rounded to bf16 before they are quantised, as training does")
    if left := left_out(plan.source.path):
        more = f" and {len(left) - 10} more" if len(left) > 10 else ""
        notes.append(f"not copied: {', '.join(left[:10])}{more}")
    if plan.scale_fmt:
        notes.append(f"scale_fmt {plan.scale_fmt} was tested with: {', '.join(TESTED[plan.scale_fmt])}")
    return notes
