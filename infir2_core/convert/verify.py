"""Whether a Hugging Face folder is what its config says, tensor by tensor, before any engine or hub sees it.

Loaders accept a missing scale, a wrong scale grid and NaN without a word. `verify` looks at every header, every index
entry, every shape and dtype, and, unless told otherwise, at every value. It goes on after a problem, so that one run
shows all of them; `require` turns what was found into one error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.schema import ModelShape
from ..errors import InputError
from ..model.hf import stray_weights
from .cast_plan import LARGEST_SCALE, ROLES, SCALE_FMTS, uneven_note
from .folder import (
    FLOATS,
    SCALE,
    dtype_trouble,
    grid,
    known_extra,
    links_outside,
    named_files,
    read_config,
    read_entries,
    short,
    tensor_shapes,
    tied_trouble,
    weight_shape,
)
from .safefile import Entry, Reader
from .streams import Strip, check_finite, in_parallel, strips

Watch = Callable[[int, int], None]
CODES = torch.float8_e4m3fn


@dataclass
class Verdict:
    """What `verify` found. `kind` is "fp8" or the dtype of most weights; an empty `problems` means a sound folder.

    `notes` are what loaders mind of a sound one.
    """

    path: Path
    kind: str = ""
    tensors: int = 0
    nbytes: int = 0
    quantised: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "folder": str(self.path),
            "kind": self.kind,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "quantised": self.quantised,
            "problems": self.problems,
            "notes": self.notes,
        }


def verify(folder: Path, values: bool = True, watch: Watch = lambda done, total: None) -> Verdict:
    """Checks a folder of bf16, fp16, fp32 or block-FP8 weights.

    Args:
        values: also read every tensor (NaN, infinities, scales); headers alone otherwise.
        watch: told bytes done and bytes in all.

    Raises:
        InputError: there is no such folder.
    """
    verdict = Verdict(folder)
    if not folder.is_dir():
        raise InputError("there is no such folder", str(folder), "give a Hugging Face folder")
    try:
        config = read_config(folder)
        shape = weight_shape(config, str(folder / "config.json"))
        files = named_files(folder)
        entries = read_entries(folder, files)
    except InputError as error:
        verdict.problems.append(_line(error))
        return verdict
    verdict.tensors, verdict.nbytes = len(entries), sum(entry.nbytes for entry in entries.values())
    verdict.problems += [f"{name} is in no entry of the index" for name in stray_weights(folder, files)]
    verdict.problems += links_outside(folder)
    if "auto_map" in config:
        verdict.problems.append("config.json: auto_map asks loaders to run code that comes with the weights")
    quantization = config.get("quantization_config")
    block = _block(quantization, verdict) if quantization else None
    skipped = _skipped(quantization) if isinstance(quantization, dict) else []
    _check_headers(entries, shape, block, skipped, verdict)
    verdict.problems += dtype_trouble(entries, config)
    if values and (trouble := tied_trouble(entries, shape)):
        verdict.problems.append(trouble)
    if values:
        _check_values(entries, quantization, verdict, watch)
    return verdict


def require(folder: Path, values: bool = True, watch: Watch = lambda done, total: None) -> Verdict:
    """As `verify`.

    Raises:
        InputError: the folder has a problem; up to five are named.
    """
    verdict = verify(folder, values, watch)
    if verdict.problems:
        listed = "; ".join(verdict.problems[:5])
        more = f"; and {len(verdict.problems) - 5} more" if len(verdict.problems) > 5 else ""
        hint = f"infir2 convert verify {folder}  shows all of them"
        raise InputError(f"the folder fails its check: {listed}{more}", str(folder), hint)
    return verdict


def _line(error: InputError) -> str:
    return f"{error.what} ({error.where})" if error.where else error.what


def _block(quantization: Any, verdict: Verdict) -> tuple[int, int] | None:
    """Block size of a quantization_config that loaders of block FP8 take; problems for everything else."""
    if not isinstance(quantization, dict):
        verdict.problems.append("config.json: quantization_config is not an object")
        return None
    wanted = {"quant_method": ("fp8",), "activation_scheme": ("dynamic",), "fmt": ("e4m3", None)}
    for key, allowed in wanted.items():
        if quantization.get(key) not in allowed:
            shown = repr(quantization.get(key))
            verdict.problems.append(f"config.json: quantization_config.{key} is {shown}, expected {allowed[0]!r}")
    if quantization.get("scale_fmt") not in (None, "float", *SCALE_FMTS):
        verdict.problems.append(f"config.json: scale_fmt {quantization['scale_fmt']!r} is not known")
    size = quantization.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        verdict.problems.append(f"config.json: weight_block_size is {size!r}, expected two positive whole numbers")
        return None
    return size[0], size[1]


def _skipped(quantization: dict[str, Any]) -> list[str]:
    found = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or []
    return [str(name) for name in found] if isinstance(found, list) else []


def _skips(patterns: list[str], module: str) -> str:
    """The pattern by which transformers leaves `module` unquantised (a regex at its beginning, or its end), or by which
    others do (a part of its name); empty when there is none."""
    for pattern in filter(None, patterns):
        if pattern in module:
            return pattern
        try:
            if re.match(pattern, module):
                return pattern
        except re.error:
            continue
    return ""


def _check_headers(
    entries: dict[str, Entry], shape: ModelShape, block: tuple[int, int] | None, skipped: list[str], verdict: Verdict
) -> None:
    problems, wanted, dtypes = verdict.problems, tensor_shapes(shape), set()
    cast: list[Entry] = []
    for name, expected in wanted.items():
        entry = entries.get(name)
        if entry is None:
            problems.append(f"tensor '{name}' is missing")
            continue
        if entry.shape != expected:
            problems.append(f"'{name}' has shape {list(entry.shape)}, config.json says {list(expected)}")
        module = name.removesuffix(".weight")
        linear = module.endswith(tuple(ROLES)) and name.endswith(".weight")
        if block and linear and entry.dtype == CODES and (pattern := _skips(skipped, module)):
            problems.append(
                f"'{name}' is quantised, and modules_to_not_convert names it ('{pattern}'): loaders skip it"
            )
        elif block and linear and not _skips(skipped, module):
            cast.append(entry)
            verdict.quantised += entry.dtype == CODES
            _check_scale(entry, entries.get(name + SCALE), block, problems)
        elif entry.dtype not in FLOATS:
            why = (
                "config.json does not say that it is quantised"
                if entry.dtype == CODES
                else "expected bf16, fp16 or fp32"
            )
            problems.append(f"'{name}' has dtype {short(entry.dtype)}: {why}")
        elif name + SCALE in entries:
            problems.append(f"'{name}{SCALE}' belongs to a weight that is not quantised")
        else:
            dtypes.add(short(entry.dtype))
    for name in entries:
        if name not in wanted and name.removesuffix(SCALE) not in wanted and not known_extra(name, shape):
            problems.append(f"tensor '{name}' has no place in this model")
    if block:
        verdict.notes += uneven_note(cast, block)
    verdict.kind = "fp8" if block else "/".join(sorted(dtypes))


def _check_scale(weight: Entry, scale: Entry | None, block: tuple[int, int], problems: list[str]) -> None:
    if weight.dtype != CODES:
        kind = short(weight.dtype)
        problems.append(f"'{weight.name}' has dtype {kind}, config.json says that it is quantised to E4M3")
        return
    if scale is None:
        problems.append(f"'{weight.name}' has no scale: '{weight.name}{SCALE}' is missing")
        return
    if scale.dtype != torch.float32:
        problems.append(f"'{scale.name}' has dtype {short(scale.dtype)}, expected float32")
    if len(weight.shape) == 2 and scale.shape != grid(weight.shape, block):
        expected = list(grid(weight.shape, block))
        problems.append(f"'{scale.name}' has the grid {list(scale.shape)}, {list(weight.shape)} needs {expected}")


def _check_values(entries: dict[str, Entry], quantization: Any, verdict: Verdict, watch: Watch) -> None:
    """Every value of every tensor; at most one problem a tensor."""
    pow2 = isinstance(quantization, dict) and quantization.get("scale_fmt") == "ue8m0"
    found: dict[str, str] = {}
    files = sorted({entry.file for entry in entries.values()})
    readers = {file: Reader(file) for file in files}
    done = 0

    def work(item: tuple[Entry, Strip]) -> int:
        entry, strip = item
        try:
            rows = readers[entry.file].rows(entry, strip.first, strip.count)
            if entry.name.endswith(SCALE):
                _check_scales(rows, entry.name, pow2)
            elif entry.dtype in (*FLOATS, CODES):
                check_finite(rows, entry.name, "", strip.first)
        except InputError as error:
            found.setdefault(entry.name, _line(error))
        return strip.nbytes

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        watch(done, verdict.nbytes)

    def items() -> Any:
        for entry in sorted(entries.values(), key=lambda e: (e.file.name, e.start)):
            width = math.prod(entry.row_shape)
            for strip in strips(entry.rows, width, width * entry.dtype.itemsize):
                yield entry, strip

    try:
        in_parallel(work, items(), count)
    finally:
        for reader in readers.values():
            reader.__exit__(None, None, None)
    verdict.problems += [found[name] for name in entries if name in found]


def _check_scales(scales: Tensor, name: str, pow2: bool) -> None:
    check_finite(scales, name, "")
    values = scales.float()
    if bool((values <= 0).any()):
        kind = "a zero scale" if bool((values == 0).any()) else "a negative scale"
        raise InputError(f"'{name}' has {kind}")
    if bool((values > LARGEST_SCALE).any()):
        raise InputError(f"'{name}' has scales so large that 448 times them is infinite")
    if pow2 and bool((torch.frexp(values).mantissa != 0.5).any()):
        raise InputError(f"'{name}' has scales that are no powers of two, scale_fmt says ue8m0")
