"""A model as a torch_dist checkpoint for Megatron-LM and slime (`--load`, `--ref-load`), written without Megatron.

Layers are stacked along a leading axis, each a piece of its own, as TransformerEngine's layer spec names them; any
tensor and pipeline parallelism may load it. FP8 extra state is there and empty, so that strict loaders find its names.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...config.schema import ModelShape
from ..export import Watch
from ..staging import Staging, write_whole
from ..weights import Weights, stored_bytes
from .dist import COMMON_FILE, CONFIG, METADATA, TRACKER
from .names import EMBEDDING, FC1, FC2, HEAD, NORM, NORM1, NORM2, PROJ, QKV, heads_of

FILE_BYTES = 1 << 30  # of one .distcp file, unless a single piece is larger
PIECE_BYTES = 1 << 28
RELEASE = "release"


@dataclass(frozen=True)
class Job:
    """One piece: `name` and global `shape` of its tensor, its place in it, and the HF rows that fill it."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sources: tuple[tuple[str, int, int], ...]  # HF name, first row, number of rows, in the order they are stored


def export_megatron(weights: Weights, out: Path, watch: Watch = lambda done, total: None) -> dict[str, Any]:
    """Writes OUT/release and OUT/latest_checkpointed_iteration.txt; the same call continues an unfinished one.

    Args:
        weights: of any format; dtypes are kept.
        watch: told bytes read and bytes in all.

    Raises:
        InputError: `out` exists, no room, or NaN in a tensor (named).
    """
    total = stored_bytes(weights.tensors)
    files = _files(list(jobs(weights.shape, weights)), weights)
    plan = {"what": "megatron", "version": __version__, "source": str(weights.path.resolve())}
    done, items = 0, []
    with Staging(out, plan | {"identity": weights.identity()}, total + (total >> 6), weights.path) as stage:
        for file, batch in files.items():
            record = stage.finished(file)
            if record is None:
                record = {"items": _write_file(stage.aside(file), batch, weights)}
                stage.finish(file, record)
            items += [(file, *item) for item in record["items"]]
            done += sum(math.prod(job.sizes) * _dtype(job, weights).itemsize for job in batch)
            watch(done, total)
        extra = "__0_objects.distcp"
        objects = _write_objects(stage.path / extra, weights.shape.layers)
        inside = stage.path / RELEASE
        inside.mkdir(exist_ok=True)
        for file in (*files, extra):
            (stage.path / file).rename(inside / file)
        _write_common(inside, weights.shape)
        _write_metadata(inside / METADATA, items, [(extra, *item) for item in objects], weights, files)
        write_whole(stage.path / TRACKER, RELEASE)
        stage.publish()
    return {"out": out, "tensors": len({item[1] for item in items}), "bytes": total, "layout": "megatron"}


def jobs(shape: ModelShape, weights: Weights) -> Iterator[Job]:
    """Every piece of the model, in the order of the layers."""

    def whole(name: str, source: str) -> Iterator[Job]:
        dtype, size = weights.tensors[source]
        step = max(1, PIECE_BYTES // max(1, math.prod(size[1:]) * dtype.itemsize))
        for first in range(0, size[0], step):
            rows = min(step, size[0] - first)
            offsets = (first, *(0 for _ in size[1:]))
            yield Job(name, size, offsets, (rows, *size[1:]), ((source, first, rows),))

    def layer(i: int, name: str, sources: list[tuple[str, int, int]], first: int = 0, rows: int = 0) -> Job:
        hf = f"model.layers.{i}."
        size = weights.tensors[hf + sources[0][0]][1]
        height = sum(count for *_, count in sources)
        shape_ = (shape.layers, rows or height, *size[1:])
        offsets = (i, first, *(0 for _ in size[1:]))
        named = tuple((hf + source, begin, count) for source, begin, count in sources)
        return Job(f"decoder.layers.{name}", shape_, offsets, (1, height, *size[1:]), named)

    yield from whole(EMBEDDING, "model.embed_tokens.weight")
    hidden, ffn = shape.hidden, shape.ffn
    for i in range(shape.layers):
        yield layer(i, NORM1[0], [("input_layernorm.weight", 0, hidden)])
        for kind in ("weight", "bias"):
            fused = [(f"self_attn.{letter}_proj.{kind}", first, count) for letter, first, count in heads_of(shape)]
            yield layer(i, f"{QKV}.{kind}", fused)
        yield layer(i, f"{PROJ}.weight", [("self_attn.o_proj.weight", 0, hidden)])
        yield layer(i, NORM2[0], [("post_attention_layernorm.weight", 0, hidden)])
        yield layer(i, f"{FC1}.weight", [("mlp.gate_proj.weight", 0, ffn)], 0, 2 * ffn)
        yield layer(i, f"{FC1}.weight", [("mlp.up_proj.weight", 0, ffn)], ffn, 2 * ffn)
        yield layer(i, f"{FC2}.weight", [("mlp.down_proj.weight", 0, hidden)])
    yield from whole(NORM, "model.norm.weight")
    if not shape.tied:
        yield from whole(HEAD, "lm_head.weight")


def _dtype(job: Job, weights: Weights) -> torch.dtype:
    return weights.tensors[job.sources[0][0]][0]


def _files(found: list[Job], weights: Weights) -> dict[str, list[Job]]:
    groups: list[list[Job]] = [[]]
    size = 0
    for job in found:
        nbytes = math.prod(job.sizes) * _dtype(job, weights).itemsize
        if size and size + nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(job)
        size += nbytes
    return {f"__0_{number}.distcp": group for number, group in enumerate(groups)}


def _write_file(path: Path, batch: list[Job], weights: Weights) -> list[list[Any]]:
    """Writes the pieces one after another; [name, global shape, offsets, sizes, start, length] of each."""
    items = []
    with path.open("wb") as file:
        for job in batch:
            items.append([job.name, job.shape, job.offsets, job.sizes, *_save(_piece(job, weights), file)])
        file.flush()
        os.fsync(file.fileno())
    return items


def _piece(job: Job, weights: Weights) -> Tensor:
    parts = [weights.rows(*source) for source in job.sources]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(job.sizes)


def _save(value: Tensor | list[Any] | dict[str, Any], file: Any) -> tuple[int, int]:
    start = file.tell()
    try:
        torch.save(value, file)
    except RuntimeError as error:  # in which torch hides that the disk is full
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return start, file.tell() - start


def _write_objects(path: Path, layers: int) -> list[list[Any]]:
    """Empty extra state under every name that TransformerEngine's layers ask for."""
    modules = (QKV, PROJ, "self_attention.core_attention", FC1, FC2)
    names = [f"decoder.layers.{m}._extra_state/shard_{i}_{layers}" for i in range(layers) for m in modules]
    names.append("decoder.final_layernorm._extra_state/shard_0_1")
    with path.open("wb") as file:
        items = [[name, *_save([None], file)] for name in names]
        file.flush()
        os.fsync(file.fileno())
    return items


def _write_common(folder: Path, shape: ModelShape) -> None:
    """common.pt with the arguments that say what model this is, and metadata.json."""
    args = argparse.Namespace(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        group_query_attention=shape.kv_heads != shape.heads,
        kv_channels=shape.head_dim,
        vocab_size=shape.vocab,
        padded_vocab_size=shape.vocab,
        max_position_embeddings=shape.max_positions,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_base),
        rotary_percent=1.0,
        norm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        untie_embeddings_and_output_weights=not shape.tied,
        iteration=0,
    )
    with (folder / COMMON_FILE).open("wb") as file:
        _save({"args": args, "iteration": 0, "checkpoint_version": 3.0}, file)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    write_whole(folder / CONFIG, json.dumps(config))


def _write_metadata(
    path: Path, items: list[Any], objects: list[Any], weights: Weights, files: dict[str, list[Job]]
) -> None:
    """The pickle that torch.distributed.checkpoint reads, made of its own classes."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    dtypes = {job.name: _dtype(job, weights) for batch in files.values() for job in batch}
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for file, name, shape, offsets, sizes, start, length in items:
        entry = described.setdefault(
            name, dcp.TensorStorageMetadata(dcp.TensorProperties(dtypes[name]), torch.Size(shape), [])
        )
        entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        stored[dcp.MetadataIndex(name, offsets)] = _StorageInfo(file, start, length)
    for file, name, start, length in objects:
        described[name] = dcp.BytesStorageMetadata()
        stored[dcp.MetadataIndex(name)] = _StorageInfo(file, start, length)
    paths = {name: (name,) for name in described}
    with path.open("wb") as target:
        pickle.dump(dcp.Metadata(described, paths, stored, dcp.StorageMeta()), target)
        target.flush()
        os.fsync(target.fileno())
