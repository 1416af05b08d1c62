"""The FP8 cast: E4M3 codes and float32 `weight_scale_inv` for the linear layers of a Hugging Face folder.

Strips of rows are quantised by the quantiser that trains, so codes and scales are those of training by construction.
Every output file is written aside and renamed; the folder gets its name after the last one. What is measured on the
way (relative error and underflow of each weight) is kept in cast_report.json.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..errors import InputError
from ..hub import hub_name
from ..model.hf import INDEX
from ..ops.dispatch import quantize
from ..precision.spec import QuantPlan
from .cast_plan import LARGEST_SCALE, CastPlan
from .folder import SCALE, grid
from .safefile import Entry, Reader, Writer
from .staging import Staging, copy_file, write_whole
from .streams import DEVICE_STRIP, PASSING, STRIP, Strip, check_finite, in_parallel, rounded, strips
from .verify import require

REPORT = "cast_report.json"
Watch = Callable[[int, int, str], None]  # bytes done, bytes in all, the shard


@dataclass
class Sums:
    """What is added up over the strips of one weight."""

    error: float = 0.0  # of (code * scale - weight)^2
    square: float = 0.0  # of weight^2
    underflow: int = 0  # weights other than zero whose code is zero
    elements: int = 0
    smallest: float = math.inf  # scales
    largest: float = 0.0
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def add(self, weight: Tensor, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """`weight` and `values` are float32 of the same shape; `values` is overwritten."""
        error, square = _square(values.sub_(weight)), _square(weight)
        zeros = codes.numel() - int(torch.count_nonzero(codes.view(torch.uint8) & 0x7F))
        underflow = zeros - (weight.numel() - int(torch.count_nonzero(weight)))
        low, high = (float(edge) for edge in scales.aminmax())
        with self.lock:
            self.error, self.square = self.error + error, self.square + square
            self.underflow, self.elements = self.underflow + underflow, self.elements + weight.numel()
            self.smallest, self.largest = min(self.smallest, low), max(self.largest, high)

    def record(self) -> dict[str, Any]:
        """Relative error (Frobenius norm), share that became zero, range of the scales, and the sums themselves."""
        return {
            "relative_error": math.sqrt(self.error / self.square) if self.square else 0.0,
            "underflow": self.underflow / self.elements if self.elements else 0.0,
            "scale_min": self.smallest,
            "scale_max": self.largest,
            "sums": [self.error, self.square, self.underflow, self.elements],
        }


def _square(values: Tensor) -> float:
    """Sum of squares, in float64 only where float32 has no room for it."""
    norm = float(torch.linalg.vector_norm(values))
    return (norm if math.isfinite(norm) else float(torch.linalg.vector_norm(values, dtype=torch.float64))) ** 2


def cast(
    plan: CastPlan,
    out: Path,
    device: str = "cpu",
    watch: Watch = lambda done, total, shard: None,
    checked: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Writes the FP8 folder `out` and returns its report. The same call continues what an earlier one left unfinished.

    Args:
        plan: from `plan_cast`.
        out: final folder; must not exist.
        device: where strips are quantised.
        watch: told of the progress.
        checked: told of the progress of the check that the finished folder must pass, in bytes.

    Raises:
        InputError: `out` exists or is the source, no room, or a tensor with NaN or infinite values (named).
    """
    source = plan.source
    identity = plan.as_dict() | {"version": __version__, "files": _identity(plan), "source": str(source.path.resolve())}
    with Staging(out, identity, plan.output_bytes, source.path) as stage:
        done = 0
        tensors: dict[str, dict[str, Any]] = {}
        for shard, entries in source.shards.items():
            record = stage.finished(shard)
            if record is None:
                progress = partial(_add, watch, done, plan.input_bytes, shard)
                record = _cast_shard(plan, entries, stage.aside(shard), device, progress)
                stage.finish(shard, record)
            done += sum(entry.nbytes for entry in entries)
            watch(done, plan.input_bytes, shard)
            tensors |= record["tensors"]
        for file in source.side_files():
            copy_file(source.path / file, stage.path / file)
        _write_index(plan, stage.path)
        config = source.config | {"quantization_config": plan.quantization_config()}
        write_whole(stage.path / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        report = _report(plan, tensors)
        write_whole(stage.path / REPORT, json.dumps(report, indent=1, allow_nan=False) + "\n")
        require(stage.path, watch=checked)
        stage.publish()
    return report


def _add(watch: Watch, done: int, total: int, shard: str, nbytes: int) -> None:
    watch(done + nbytes, total, shard)


def _identity(plan: CastPlan) -> dict[str, list[int]]:
    """What changes when the source does."""
    found = {}
    for name in [*plan.source.shards, "config.json"]:
        status = (plan.source.path / name).stat()
        found[name] = [status.st_size, status.st_mtime_ns]
    return found


def _cast_shard(
    plan: CastPlan, entries: list[Entry], aside: Path, device: str, progress: Callable[[int], None]
) -> dict[str, Any]:
    chosen, height, at_once = set(plan.cast), plan.block[0], STRIP if device == "cpu" else DEVICE_STRIP
    sums = {entry.name: Sums() for entry in entries if entry.name in chosen}
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for entry in entries:
        if entry.name in chosen:
            layout[entry.name] = (torch.float8_e4m3fn, entry.shape)
            layout[entry.name + SCALE] = (torch.float32, grid(entry.shape, plan.block))
        else:
            layout[entry.name] = (entry.dtype, entry.shape)
    total = 0

    def work(item: tuple[Entry, Strip]) -> int:
        entry, strip = item
        rows = reader.rows(entry, strip.first, strip.count)
        if entry.name in chosen:
            rows = rows.to(device)
        check_finite(rows, entry.name, str(entry.file), strip.first)
        if entry.name not in chosen:
            writer.write(entry.name, rows, strip.first)
            return strip.nbytes
        rows = rounded(rows, torch.bfloat16, entry.name, str(entry.file))
        codes, scales = _quantised(rows, plan, sums[entry.name])
        if float(scales.max()) > LARGEST_SCALE:
            what = f"'{entry.name}' is not finite in FP8: it has the value {float(rows.abs().max()):g}, too large for "
            kind = "a power-of-two scale" if plan.rule.spec.scale == "pow2" else "a float32 scale"
            hint = f"--keep '{entry.name.removesuffix('.weight')}', or use a checkpoint from before it diverged"
            raise InputError(what + kind, str(entry.file), hint)
        writer.write(entry.name, codes, strip.first)
        writer.write(entry.name + SCALE, scales, strip.first // height)
        return strip.nbytes

    def count(nbytes: int) -> None:
        nonlocal total
        total += nbytes
        progress(total)

    def items() -> Any:
        for entry in entries:
            width = math.prod(entry.row_shape)
            multiple, elements = (height, at_once) if entry.name in chosen else (1, PASSING)
            for strip in strips(entry.rows, width, width * entry.dtype.itemsize, multiple, elements):
                yield entry, strip

    with Reader(entries[0].file) as reader:
        writer, whole = Writer(aside, layout), False
        try:
            in_parallel(work, items(), count)
            whole = True
        finally:
            writer.close(sync=whole)
    return {"tensors": {name: one.record() for name, one in sums.items()}}


def _quantised(rows: Tensor, plan: CastPlan, sums: Sums) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and scales [R / height, C / width] of some bf16 rows of a weight, on the CPU."""
    quant, width = QuantPlan(row=plan.rule.spec), plan.block[1]
    if rows.is_cuda:
        return _piece(rows, quant, sums)
    codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(grid(tuple(rows.shape), plan.block), dtype=torch.float32)
    # In pieces of a few columns, whose temporaries stay in the cache.
    piece = max(1, STRIP // max(1, rows.shape[0] * width)) * width
    for first in range(0, rows.shape[1], piece):
        made, scale = _piece(rows[:, first : first + piece], quant, sums)
        codes[:, first : first + piece] = made
        scales[:, first // width : first // width + scale.shape[1]] = scale
    return codes, scales


def _piece(rows: Tensor, quant: QuantPlan, sums: Sums) -> tuple[Tensor, Tensor]:
    wide = rows.float()
    made = quantize(rows if rows.is_cuda else wide, quant).row  # a CPU computes in float32 anyway
    assert made is not None
    sums.add(wide, made.dequantize(), made.data, made.scale)
    return made.data.cpu(), made.scale.cpu()


def _write_index(plan: CastPlan, folder: Path) -> None:
    if not plan.source.indexed:
        return
    chosen, index, total = set(plan.cast), {}, 0
    for name, entry in plan.source.entries.items():
        index[name] = entry.file.name
        total += entry.nbytes
        if name in chosen:
            index[name + SCALE] = entry.file.name
            total += math.prod(entry.shape) + 4 * math.prod(grid(entry.shape, plan.block)) - entry.nbytes
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    write_whole(folder / INDEX, json.dumps(content, indent=2) + "\n")


def _report(plan: CastPlan, tensors: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Per weight, per block of the decoder, and over everything that was cast."""
    layers: dict[str, list[list[float]]] = {}
    shown = {}
    for name in plan.cast:
        record = dict(tensors[name])
        layers.setdefault(".".join(name.split(".")[:3]), []).append(record.pop("sums"))
        shown[name] = record

    def joined(rows: list[list[float]]) -> dict[str, float]:
        error, square, underflow, elements = (sum(column) for column in zip(*rows, strict=True))
        relative = math.sqrt(error / square) if square else 0.0
        return {"relative_error": relative, "underflow": underflow / elements if elements else 0.0}

    everything = [row for rows in layers.values() for row in rows]
    return {
        "tool": f"infir2 {__version__}",
        "source_id": hub_name(plan.source.path),
        "scale": plan.rule.spec.scale,
        "why": plan.rule.why,
        "quantization_config": plan.quantization_config(),
        "notes": plan.notes,
        "kept": plan.kept,
        "input_bytes": plan.input_bytes,
        "output_bytes": plan.output_bytes,
        "total": joined(everything) if everything else {"relative_error": 0.0, "underflow": 0.0},
        "layers": {name: joined(rows) for name, rows in layers.items()},
        "tensors": shown,
    }
