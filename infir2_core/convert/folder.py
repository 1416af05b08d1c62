"""A Hugging Face folder as a conversion sees it: config, tensors with their places, and the files beside them.

Stricter than what loads a model for training (model/hf.py): files must be what their header says, index and files must
agree both ways, nothing may point outside the folder, and every tensor must have the shape that config.json implies.
Only headers are read here, and a head that was written although it is tied.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from ..config.hf_config import KEYS, refuse_malformed, shape_from_hf
from ..config.schema import ModelShape
from ..errors import InputError
from ..model.hf import INDEX, SINGLE, refuse_strays, weight_files
from ..train.shards import raw_bytes
from .safefile import Entry, Reader, read_header

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SCALE = "_scale_inv"  # X.weight -> X.weight_scale_inv
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Weights in formats that are not read here: copying them beside converted ones would only mislead a loader.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors", ".tflite")
_SKIPPED = {INDEX, "config.json", "pytorch_model.bin.index.json", "tf_model.h5.index.json", ".gitattributes"}


@dataclass(frozen=True)
class HFFolder:
    """Config, architecture and tensors of a folder. `entries` keeps the order of the index or of the one file."""

    path: Path
    config: dict[str, Any]
    shape: ModelShape
    entries: dict[str, Entry]

    @cached_property
    def shards(self) -> dict[str, list[Entry]]:
        """File name -> its tensors in the order of the data, file by file."""
        grouped: dict[str, list[Entry]] = {}
        for entry in sorted(self.entries.values(), key=lambda e: (e.file.name, e.start)):
            grouped.setdefault(entry.file.name, []).append(entry)
        return grouped

    @property
    def indexed(self) -> bool:
        """Whether the folder has a weight index."""
        return (self.path / INDEX).is_file()

    @property
    def quantization(self) -> dict[str, Any]:
        """quantization_config of config.json; empty without one."""
        found = self.config.get("quantization_config") or {}
        if not isinstance(found, dict):
            raise InputError("config.json: quantization_config is not an object", str(self.path / "config.json"))
        return dict(found)

    def side_files(self) -> Iterator[Path]:
        """As the function of this name."""
        return side_files(self.path)


def side_files(folder: Path) -> Iterator[Path]:
    """Every other file, relative to the folder: tokenizer, chat template, generation config, licence, card.

    Weights in other formats, hidden files and linked folders are left out; `left_out` lists them.

    Raises:
        InputError: a link that leaves the folder, or a folder or file that cannot be read.
    """
    for inside in _walk(folder):
        path = folder / inside
        if not _is_left(folder, inside) and str(inside) not in _SKIPPED and path.is_file():
            _stays_inside(path, folder)
            if not os.access(path, os.R_OK):
                raise InputError("the file cannot be read", str(path), "change its mode, or move it elsewhere")
            yield inside


def left_out(folder: Path) -> list[str]:
    """What `side_files` leaves out, relative to the folder and a hidden folder as one; the weights, config.json and
    indexes, which are read instead, do not count."""
    weights = {file.name for file in folder.glob("*.safetensors")}
    read = {*weights, INDEX, "config.json"}
    found = [f for f in _walk(folder) if str(f) not in read and (_is_left(folder, f) or str(f) in _SKIPPED)]
    return [f"{inside}/" if (folder / inside).is_dir() else str(inside) for inside in found]


def _is_left(folder: Path, inside: Path) -> bool:
    return inside.name.startswith(".") or inside.suffix in _OTHER_WEIGHTS or (folder / inside).is_dir()


def _walk(folder: Path) -> list[Path]:
    """Files of a folder at any depth, relative to it, in order; a hidden or linked folder as one."""

    def unreadable(error: OSError) -> None:
        raise InputError("the folder cannot be read", str(error.filename), "change its mode, or move it elsewhere")

    found = []
    for place, folders, files in os.walk(folder, onerror=unreadable):
        here = Path(place)
        closed = [name for name in folders if name.startswith(".") or (here / name).is_symlink()]
        folders[:] = [name for name in folders if name not in closed]
        found += [(here / name).relative_to(folder) for name in (*closed, *files)]
    return sorted(found)


def links_outside(folder: Path) -> Iterator[str]:
    """What is wrong with each link of a folder, of whatever name and depth, that leads out of it or nowhere."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            try:
                _stays_inside(path, folder)
                path.stat()
            except InputError as error:
                yield error.what
            except (OSError, RuntimeError):  # a loop
                yield f"{path.relative_to(folder)} is a link that leads nowhere"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        InputError: there is none, or it is no JSON object.
    """
    file = folder / "config.json"
    if not folder.is_dir():
        raise InputError("there is no such folder", str(folder), "give a Hugging Face folder or a hub id")
    if file.exists() and not file.is_file():
        raise InputError("config.json is no file", str(file), "download the model again")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # halves of characters, which nobody could write again
    except FileNotFoundError:
        hint = "give the folder that has config.json beside the weights"
        raise InputError("this is no Hugging Face model: it has no config.json", str(folder), hint) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"config.json cannot be read: {error}", str(file), "download the model again") from error
    if not isinstance(content, dict):
        raise InputError("config.json is not an object", str(file), "download the model again")
    return content


def weight_shape(config: dict[str, Any], where: str) -> ModelShape:
    """The architecture as far as tensors show it: scaled rope, sliding windows and quantisation do not matter here.

    Raises:
        InputError: a model class that is not known (with those that are), or a key that is missing or wrong.
    """
    refuse_malformed(config, where)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        return shape_from_hf(plain, where)
    except InputError:
        wanted = {"model_type", *KEYS.values()} - {KEYS["rope_base"]}
        return shape_from_hf({key: value for key, value in plain.items() if key in wanted}, where)


def open_folder(folder: Path) -> HFFolder:
    """Reads config.json, index and headers, and checks that they agree with each other.

    Raises:
        InputError: missing index, shard or tensor, a truncated file, an index entry that leaves the folder, a shape
            or dtype that the config contradicts, a tensor without a place in the model, weights that the index does
            not name.
    """
    config = read_config(folder)
    shape = weight_shape(config, str(folder / "config.json"))
    files = named_files(folder)
    refuse_strays(folder, files)
    entries = read_entries(folder, files)
    wanted = tensor_shapes(shape)
    for name, expected in wanted.items():
        if name not in entries:
            missing = [n for n in wanted if n not in entries]
            raise InputError(f"{len(missing)} tensors are missing, the first is '{name}'", str(folder))
        if entries[name].shape != expected:
            found = list(entries[name].shape)
            what = f"'{name}' has shape {found}, config.json says {list(expected)}"
            raise InputError(what, str(entries[name].file), "the weights and config.json are of different models")
    for name in entries:
        if name not in wanted and not known_extra(name, shape) and name.removesuffix(SCALE) not in wanted:
            raise InputError(f"tensor '{name}' has no place in a {config['model_type']} model", str(files[name]))
    if trouble := tied_trouble(entries, shape):
        hint = "remove it, or set tie_word_embeddings to false if the model has a head of its own"
        raise InputError(trouble, str(files[HEAD]), hint)
    for trouble in dtype_trouble(entries, config):
        hint = "set dtype in config.json to what the weights are, or download the model again"
        raise InputError(trouble, str(folder / "config.json"), hint)
    return HFFolder(folder, config, shape, entries)


def tied_trouble(entries: Mapping[str, Entry], shape: ModelShape) -> str:
    """What is wrong with a head that was written although config.json ties it: loaders differ in what they make of one
    that is not the embedding. Empty when nothing is, or when there is none.
    """
    head, embedding = entries.get(HEAD), entries.get(EMBEDDING)
    if not shape.tied or head is None or embedding is None:
        return ""
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return f"'{HEAD}' is {list(head.shape)} of {head.dtype}, and config.json ties it to '{EMBEDDING}'"
    step = max(1, (1 << 22) // max(1, math.prod(head.row_shape)))
    with Reader(head.file) as one, Reader(embedding.file) as other:
        for first in range(0, head.rows, step):
            count = min(step, head.rows - first)
            a, b = raw_bytes(one.rows(head, first, count)), raw_bytes(other.rows(embedding, first, count))
            if a != b:
                return f"'{HEAD}' differs from '{EMBEDDING}', to which config.json ties it"
    return ""


def dtype_trouble(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> list[str]:
    """What config.json and the weights that are not quantised say of their dtype, where they disagree.

    Norms and biases may have any: some writers keep them in float32.
    """
    held = [e for e in entries.values() if e.dtype in FLOATS and e.name.endswith(".weight") and "norm" not in e.name]
    linears: dict[torch.dtype, str] = {}
    for entry in held:
        if ".layers." in entry.name:
            linears.setdefault(entry.dtype, entry.name)
    found = []
    if len(linears) > 1:
        shown = ", ".join(f"{short(dtype)} (such as '{name}')" for dtype, name in linears.items())
        found.append(f"the linear layers have several dtypes: {shown}")
    for key in ("dtype", "torch_dtype"):
        others = [e for e in held if config.get(key) and short(e.dtype) != config[key]]
        if others:
            named = f"{len(others)} weights have another, such as '{others[0].name}': {short(others[0].dtype)}"
            found.append(f"config.json: {key} is {config[key]}, and {named}")
    return found


def short(dtype: torch.dtype) -> str:
    """`bfloat16`, as config.json spells it."""
    return str(dtype).removeprefix("torch.")


def named_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or from the header of the one file; InputError as `weight_files`."""
    single = folder / SINGLE
    if not (folder / INDEX).is_file() and single.is_file() and _stays_inside(single, folder):
        return dict.fromkeys(read_header(single), single)
    return weight_files(folder)


def read_entries(folder: Path, files: dict[str, Path]) -> dict[str, Entry]:
    """The entries of all `files`, which the index names.

    Raises:
        InputError: a file is damaged, is a link that leaves the folder, or disagrees with the index.
    """
    headers = {path: read_header(path) for path in sorted(set(files.values())) if _stays_inside(path, folder)}
    for path, held in headers.items():
        for name in held:
            if files.get(name) != path:
                where = files[name].name if name in files else "not at all"
                what = f"'{name}' is in {path.name}, the index names it {where}"
                raise InputError(what, str(folder / INDEX), "download the model again, index included")
    for name, path in files.items():
        if name not in headers[path]:
            raise InputError(f"tensor '{name}' is not in the file its index names", str(path))
    return {name: headers[path][name] for name, path in files.items()}


def _stays_inside(path: Path, folder: Path) -> bool:
    """Links may lead to the folder itself or, as in the hub's cache, to the blobs of the same repository."""
    real, home = path.resolve(), folder.resolve()
    allowed = [home] + ([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])
    if not any(real.is_relative_to(place) for place in allowed):
        what = f"{path.relative_to(folder)} is a link that leaves the folder: {real}"
        raise InputError(what, str(folder), "remove it, or copy the file here")
    return True


@cache
def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of a model, in the order of the layers."""
    from ..model.decoder import Decoder
    from ..precision.recipe import load_recipe

    views = Decoder(shape, load_recipe("bf16"), device="meta").hf_views()
    return {name: tuple(view.shape) for name, view in views.items()}


def known_extra(name: str, shape: ModelShape) -> bool:
    """Tensors that some writers add and no loader needs: a tied head, and rotary frequencies."""
    return name.endswith("rotary_emb.inv_freq") or (shape.tied and name == HEAD)


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a [rows, columns] weight, blocks at the edges counted."""
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])
