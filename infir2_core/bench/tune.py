"""Who computes which FP8 GEMM fastest on this card, libraries or our own kernel: the table of ops/hopper/gemm.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config.presets import load_preset
from ..errors import InputError, MachineError
from ..machine import version
from ..ops.dispatch import fast, quantize
from ..ops.hopper import gemm
from ..precision.recipe import load_recipe
from ..precision.spec import QuantPlan
from .ceilings import linears, sustained
from .clocks import Load, Meter

if TYPE_CHECKING:
    from ..config.schema import ModelShape

KEYS = ("kind", "m", "n", "k")
LIBRARIES = (gemm.CUBLASLT, gemm.DEEPGEMM, gemm.OWN)


def shapes(model: ModelShape, tokens: int) -> list[dict[str, Any]]:
    """kind, m, n and k of every FP8 GEMM in a step of `tokens` tokens, each once."""
    found = []
    for inputs, outputs in linears(model).values():
        found += [("2d", tokens, outputs, inputs), ("2d", tokens, inputs, outputs), ("1d", outputs, inputs, tokens)]
    return [dict(zip(KEYS, entry, strict=True)) for entry in dict.fromkeys(found)]


def measure(size: str, tokens: int, note: Callable[[str], None], meter: Meter | None = None) -> list[dict[str, Any]]:
    """The shapes of a preset with `tflops` of each of `LIBRARIES` that takes it; operands are quantised noise.

    `meter` reads the card while GEMMs run.

    Raises:
        MachineError: no Hopper GPU.
    """
    if not fast(torch.empty(0, device="cuda")):
        raise MachineError("the libraries to be compared need a Hopper GPU", "--tune")
    recipe = load_recipe("infir2")
    tile, square = (QuantPlan(row=recipe.spec(name)) for name in ("tile", "square"))
    made = []
    for entry in shapes(load_preset(size).model, tokens):
        m, n, k = entry["m"], entry["n"], entry["k"]
        note(f"{m} x {n} x {k}")
        lefts = [quantize(_random(m, k), tile).row for _ in range(2)]
        right = quantize(_random(n, k), square if entry["kind"] == "2d" else tile).row
        dtype = torch.bfloat16 if entry["kind"] == "2d" else torch.float32
        assert right is not None and lefts[0] is not None
        rates = {}
        for by in gemm.choices(lefts[0], right, dtype):
            calls: list[Callable[[], object]] = [
                partial(gemm.scaled_matmul, left, right, dtype, by=by) for left in lefts if left is not None
            ]
            rates[by] = round(2 * m * n * k / sustained(calls, meter) / 1e9)
        made.append(entry | {"tflops": rates})
    return made


def merge(path: Path, entries: list[dict[str, Any]], about: dict[str, str]) -> int:
    """Writes entries into a table, in place of those of the same shape; the number of shapes it then has.

    Args:
        path: the table; made if it does not exist.
        entries: from `measure`.
        about: hardware and versions, written beside the shapes.

    Raises:
        InputError: the file is no such table or cannot be written.
    """
    try:
        old = json.loads(path.read_text(encoding="utf-8"))["shapes"] if path.exists() else []
        kept = {tuple(entry[key] for key in KEYS): entry for entry in [*old, *entries]}
        lines = ",\n  ".join(json.dumps(entry) for entry in kept.values())
        path.write_text(f'{json.dumps(about)[:-1]},\n "shapes": [\n  {lines}\n ]}}\n', encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the table of GEMM rates cannot be updated: {error}", str(path), "--tune FILE") from error
    return len(kept)


def about(card: str, load: Load) -> dict[str, str]:
    """What a table was measured with, and how the card ran meanwhile if that could be read."""
    packages = ("torch", "sgl-deep-gemm")
    made = {"hardware": card} | {package: version(package) or "not installed" for package in packages}
    return made | ({"load": load.told()} if load != Load() else {})


def table_rows(entries: list[dict[str, Any]]) -> list[list[str]]:
    """Cells for people: blocks, shape, and the rate of each of `LIBRARIES`."""
    return [
        [e["kind"], f"{e['m']} x {e['n']} x {e['k']}", *(str(e["tflops"].get(by, "-")) for by in LIBRARIES)]
        for e in entries
    ]


def _random(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, device="cuda", dtype=torch.float32).bfloat16()
