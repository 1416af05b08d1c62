"""Hugging Face folders: safetensors in, safetensors out, one tensor at a time.

Reads single-file and indexed models of any float dtype into the float32 masters; writes the masters rounded to bf16 (or
another dtype) with the names, config.json and metadata that loaders expect. Pickled `.bin` weights are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..config.hf_config import shape_to_hf
from ..errors import InputError
from .decoder import Decoder

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it.

    Raises:
        InputError: no safetensors weights, a file missing or unreadable, or an index entry that leaves the folder.
    """
    if (folder / INDEX).is_file():
        try:
            entries = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                "the weight index cannot be read", str(folder / INDEX), "download the model again"
            ) from error
        for name, file in entries.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise InputError(f"index entry '{name}' points outside the folder: {file}", str(folder / INDEX))
            if not (folder / file).is_file():
                raise InputError(f"shard {file} is missing", str(folder), "download the model again")
        return {name: folder / file for name, file in entries.items()}
    if not (folder / SINGLE).is_file():
        if shards := sorted(folder.glob("*.safetensors")):
            what = f"{INDEX} is missing: it says which of {len(shards)} shards holds which tensor"
            raise InputError(what, str(folder), "download the model again, index included")
        found = ", ".join(sorted(p.name for p in folder.glob("*.bin"))) or "no weights"
        raise InputError(
            f"no safetensors weights (found {found})",
            str(folder),
            "only safetensors are read; convert with transformers",
        )
    with _open(folder / SINGLE) as file:
        return {name: folder / SINGLE for name in file.keys()}


def stray_weights(folder: Path, files: dict[str, Path]) -> list[str]:
    """Safetensors files of a folder that hold none of the tensors in `files`; loaders differ in which they take."""
    return sorted({path.name for path in folder.glob("*.safetensors")} - {path.name for path in files.values()})


def refuse_strays(folder: Path, files: dict[str, Path]) -> None:
    """InputError when a folder has weights beside those in `files`, which transformers, say, would load instead."""
    if strays := stray_weights(folder, files):
        indexed = (folder / INDEX).is_file()
        what = f"{', '.join(strays)} is in no entry of the index" if indexed else f"{', '.join(strays)} beside {SINGLE}"
        stale = f"; if the index is the old one: rm {folder / INDEX}" if indexed else ""
        what += ", and loaders differ in which weights they take"
        raise InputError(what, str(folder / strays[0]), f"rm {folder / strays[0]}{stale}")


def read_tensors(folder: Path, names: dict[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor), file by file, each tensor read once."""
    for path in sorted(set(names.values())):
        with _open(path) as file:
            held = set(file.keys())
            for name in (n for n, p in names.items() if p == path):
                if name not in held:
                    raise InputError(f"tensor '{name}' is not in the file its index names", str(path))
                yield name, file.get_tensor(name)


@torch.no_grad()
def load_hf(model: Decoder, folder: Path) -> None:
    """Fills the model's masters from an HF folder.

    Raises:
        InputError: a tensor is missing, has another shape or an integer dtype, or is left over; or a second set of
            weights lies beside the one that is read.
    """
    files, wanted = weight_files(folder), model.hf_views()
    refuse_strays(folder, files)
    ignored = {n for n in files if n.endswith("rotary_emb.inv_freq")} | (
        {"lm_head.weight"} if model.shape.tied else set()
    )
    if missing := sorted(set(wanted) - set(files)):
        raise InputError(f"{len(missing)} tensors are missing, the first is '{missing[0]}'", str(folder))
    if extra := sorted(set(files) - set(wanted) - ignored):
        raise InputError(f"{len(extra)} tensors have no place in this model, the first is '{extra[0]}'", str(folder))
    for name, tensor in read_tensors(folder, {n: p for n, p in files.items() if n in wanted}):
        target = wanted[name]
        if tensor.shape != target.shape:
            raise InputError(
                f"'{name}' has shape {list(tensor.shape)}, the config says {list(target.shape)}", str(files[name])
            )
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            hint = "load the bf16 model: this one is quantised" if tensor.itemsize == 1 else ""
            raise InputError(f"'{name}' has dtype {tensor.dtype}, expected bf16, fp16 or fp32", str(files[name]), hint)
        target.copy_(tensor)


def save_hf(model: Decoder, folder: Path, dtype: torch.dtype = torch.bfloat16, shard_bytes: int = 4 << 30) -> None:
    """Writes config.json and (sharded) safetensors that transformers loads. The folder must not hold a model yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if list(folder.glob("*.safetensors")):
        raise InputError("the folder already holds a model", str(folder), "choose another folder")
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, view in model.hf_views().items():
        # A copy: safetensors refuses tensors that share memory, as the rows of a fused parameter do.
        tensor = view.to(dtype, copy=True).cpu().contiguous()
        if size and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / INDEX).write_text(text, encoding="utf-8")
    config = shape_to_hf(model.shape, dtype=str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"not a readable safetensors file: {error}", str(path), "download the file again") from error
