"""Weights of any format to a Hugging Face folder: sharded safetensors, index, config, tokenizer, recipe and card.

Tensors go through a few rows at a time. What stands beside the weights comes from the folder the model began as
(`origin`) where there is one: config.json, tokenizer, chat template, generation config, licence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config.hf_config import shape_from_hf, shape_to_hf
from ..config.schema import ModelShape
from ..errors import InputError
from ..model.hf import INDEX, SINGLE
from .folder import read_config, side_files, tensor_shapes, weight_shape
from .safefile import Writer
from .staging import Staging, check_out, copy_file, write_whole
from .streams import Strip, in_parallel, rounded
from .verify import require
from .weights import Weights, rows_as, spans, stored_bytes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHARD_BYTES = 4 << 30
Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Beside:
    """What stands beside the weights: files by name (their text), and the folder whose files are copied otherwise.

    `config` has keys of config.json that training decided; files named in `without` are not copied.
    """

    origin: Path | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def files(self) -> list[Path]:
        """Files of `origin` to copy, relative to it."""
        if self.origin is None:
            return []
        left = (*self.texts, *self.without, "cast_report.json")
        return [file for file in side_files(self.origin) if str(file) not in left]


def export_hf(
    weights: Weights,
    out: Path,
    dtype: str = "bfloat16",
    beside: Beside | None = None,
    watch: Watch = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Writes the folder `out`; the same call continues what an earlier one left unfinished.

    Args:
        weights: what is exported.
        dtype: of the exported tensors, one of `DTYPES`; values are rounded to nearest even.
        beside: config, tokenizer and other files.
        watch: told bytes read and bytes in all.
        shard_bytes: largest size of one file, unless a single tensor is larger.

    Returns:
        Facts for the user: tensors, bytes, files.

    Raises:
        InputError: `out` exists, no room, NaN in a tensor (named), a value that `dtype` cannot hold, or an origin of
            another architecture.
    """
    beside, target = beside or Beside(), DTYPES[dtype]
    check_out(out, beside.origin)
    config = _config(weights.shape, dtype, beside.origin) | dict(beside.config)
    shards = _shards({name: shape for name, (_, shape) in weights.tensors.items()}, target, shard_bytes)
    total, written = stored_bytes(weights.tensors), stored_bytes(weights.tensors, target)
    copies = sum((beside.origin / file).stat().st_size for file in beside.files()) if beside.origin else 0
    plan = {
        "what": "to-hf",
        "version": __version__,
        "source": str(weights.path.resolve()),
        "identity": weights.identity(),
        "origin": str(beside.origin),
        "dtype": dtype,
        "shards": list(shards),
    }
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        watch(done, total)

    with Staging(out, plan, written + copies, weights.path) as stage:
        for file, names in shards.items():
            if stage.finished(file) is None:
                copy_tensors(weights, stage.aside(file), {name: name for name in names}, target, count)
                stage.finish(file, {})
            else:
                count(sum(_bytes(weights.tensors[name]) for name in names))
        for side in beside.files():
            assert beside.origin is not None
            copy_file(beside.origin / side, stage.path / side)
        if len(shards) > 1:
            index = {name: file for file, names in shards.items() for name in names}
            content = {"metadata": {"total_size": written}, "weight_map": dict(sorted(index.items()))}
            write_whole(stage.path / INDEX, json.dumps(content, indent=2) + "\n")
        write_whole(stage.path / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        for name, text in beside.texts.items():
            write_whole(stage.path / name, text)
        require(stage.path, values=False)
        stage.publish()
    return {"out": out, "tensors": len(weights.tensors), "bytes": written, "files": list(shards), "dtype": dtype}


def _bytes(tensor: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(tensor[1]) * tensor[0].itemsize


def _config(shape: ModelShape, dtype: str, origin: Path | None) -> dict[str, Any]:
    """The origin's config.json with what the weights decide put in; one of our own without an origin."""
    own = shape_to_hf(shape, dtype)
    if origin is None:
        return own
    config = read_config(origin)
    theirs = weight_shape(config, str(origin / "config.json"))
    if differing := {n for n, s in tensor_shapes(shape).items() if tensor_shapes(theirs).get(n) != s}:
        name = sorted(differing)[0]
        what = f"the origin is of another architecture: '{name}' is {list(tensor_shapes(shape)[name])} here and "
        found = tensor_shapes(theirs).get(name)
        raise InputError(what + (str(list(found)) if found else "absent there"), f"--origin {origin}")
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    said = shape_from_hf(config, str(origin / "config.json"))
    for name in ("rope_base", "norm_eps", "tied"):
        if getattr(said, name) != getattr(shape, name):
            what = (
                f"the origin says {name} = {getattr(said, name)}, the weights were trained with {getattr(shape, name)}"
            )
            raise InputError(what, f"--origin {origin}", "give the model that training began with")
    return config | {"dtype": dtype, "torch_dtype": dtype}


def _shards(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, limit: int) -> dict[str, list[str]]:
    """File name -> the tensors it gets, in order."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if size and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def copy_tensors(
    weights: Weights, path: Path, names: Mapping[str, str], dtype: torch.dtype, count: Callable[[int], None]
) -> None:
    """Writes one safetensors file.

    Args:
        names: Hugging Face name -> name in the file.
        dtype: of what is written.
        count: told the bytes read by each strip.

    Raises:
        InputError: NaN or infinities in a tensor, or a value that `dtype` cannot hold.
    """

    def work(item: tuple[str, Strip]) -> int:
        name, strip = item
        rows = rows_as(weights, name, strip.first, strip.count, dtype)
        writer.write(names[name], rounded(rows, dtype, name, "--dtype"), strip.first)
        return strip.nbytes

    writer, whole = Writer(path, {to: (dtype, weights.tensors[name][1]) for name, to in names.items()}), False
    try:
        in_parallel(work, spans(weights.tensors, names), count)
        whole = True
    finally:
        writer.close(sync=whole)
