"""A Hugging Face model as a native checkpoint: float32 masters of one rank, a manifest, no optimizer state.

Runs load it as the weights they start from (`[model] from`, `--from`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..train import manifest
from .export import Watch, copy_tensors
from .staging import Staging, write_whole
from .weights import Weights, stored_bytes


def export_native(weights: Weights, out: Path, watch: Watch = lambda done, total: None) -> dict[str, Any]:
    """Writes the checkpoint folder `out`; appears whole or not at all.

    Args:
        weights: of any format; values are widened to float32, which changes none.
        watch: told bytes read and bytes in all.

    Raises:
        InputError: `out` exists, no room, or NaN in a tensor (named).
    """
    total, nbytes = stored_bytes(weights.tensors), stored_bytes(weights.tensors, torch.float32)
    plan = {"what": "native", "version": __version__, "source": str(weights.path.resolve())}
    names, file, done = {name: f"model/{name}" for name in weights.tensors}, manifest.file_name(0), 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        watch(done, total)

    with Staging(out, plan | {"identity": weights.identity()}, nbytes, weights.path) as stage:
        if stage.finished(file) is None:
            copy_tensors(weights, stage.aside(file), names, torch.float32, count)
            with stage.aside(file).open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            stage.finish(file, {"sha256": digest})
        record = stage.finished(file)
        assert record is not None
        tensors = {
            names[name]: {
                "dtype": "F32",
                "shape": list(shape),
                "parts": [{"file": file, "offset": 0, "rows": shape[0]}],
            }
            for name, (_, shape) in weights.tensors.items()
        }
        engine = {"updates": 0, "recipe": "", "model": weights.shape.model_dump()}
        content: dict[str, Any] = {"format": manifest.FORMAT, "step": 0, "world": 1}
        content |= {"files": {file: {"bytes": record["bytes"], "sha256": record["sha256"]}}, "tensors": tensors}
        content |= {"state": {"engine": engine, "origin": f"infir2 {__version__} convert from-hf"}}
        write_whole(stage.path / manifest.NAME, manifest.seal(content))
        stage.publish()
    return {"out": out, "tensors": len(tensors), "bytes": nbytes, "layout": "native"}
