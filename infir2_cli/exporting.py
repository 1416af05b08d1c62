"""Exports a run or checkpoint as a Hugging Face folder; shared by the commands that start from such a folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .output import say

# In an export: digest of the checkpoint it was made of, and its dtype. Hidden, so neither copied nor uploaded.
MARK, DTYPE = ".infir2-export.json", "bfloat16"


def find_source(reference: str | None, where: str) -> Path:
    """The folder that `reference` names: a path, the name of a run, or a hub id; None: the newest run of the project.

    Raises:
        InputError: nothing of that name.
    """
    from infir2_core.convert.sources import model_folder
    from infir2_core.errors import InputError
    from infir2_core.runs import default_runs_dir, resolve_run

    runs = default_runs_dir(Path.cwd())
    if reference is None:
        folder = resolve_run(None, runs)
        say(f"{where}: {folder}, the run written to last")
        return folder
    if (runs / reference / "config.toml").is_file():
        return runs / reference
    if "/" in reference or Path(reference).exists():
        return model_folder(reference, where)
    try:
        return resolve_run(reference, runs)
    except InputError as error:
        what = f"'{reference}' is neither a folder, nor a hub id, nor a run in {runs}"
        hint = "check the path, or see: infir2 runs list" if "infir2 cpt" in error.hint else error.hint
        raise InputError(what, where, hint) from error


def beside(folder: Path, suffix: str) -> Path:
    """The folder's sibling whose name has `suffix` at its end; also of `.` and `..`."""
    whole = folder.resolve() if folder.name in ("", "..") else folder
    return whole.with_name(f"{whole.name}{suffix}")


def default_out(folder: Path) -> Path:
    """Where the export of a run or checkpoint goes: RUN/hf/step-N inside a run, CHECKPOINT-hf elsewhere."""
    from infir2_core.config.source import CHECKPOINTS, open_native
    from infir2_core.convert.megatron.dist import find_iteration, is_megatron
    from infir2_core.errors import InputError

    if (folder / "config.json").is_file():
        raise InputError("this is a Hugging Face folder already", str(folder), "give a run or a checkpoint")
    if is_megatron(folder):
        path = find_iteration(folder, str(folder)).absolute()
        return beside(path, "-hf")
    path = open_native(folder, str(folder)).path
    return path.parent.parent / "hf" / path.name if path.parent.name == CHECKPOINTS else beside(path, "-hf")


def export(
    folder: Path, out: Path, origin: str | None = None, dtype: str = DTYPE, dry_run: bool = False
) -> dict[str, Any]:
    """Writes the Hugging Face folder `out` from a run or checkpoint, with a progress bar; the facts for the user.

    Args:
        dry_run: only look at what is there and say what would be written.
    """
    from infir2_core.config.hf_config import shape_from_hf
    from infir2_core.convert import native_in
    from infir2_core.convert.export import DTYPES, export_hf
    from infir2_core.convert.folder import read_config
    from infir2_core.convert.megatron import surroundings as megatron_in
    from infir2_core.convert.megatron.weights import MegatronWeights
    from infir2_core.convert.sources import model_folder
    from infir2_core.convert.staging import check_out
    from infir2_core.convert.weights import NativeWeights, open_weights, stored_bytes
    from infir2_core.errors import InputError

    from .progress import BytesBar

    check_out(out)
    home = model_folder(origin, "--origin") if origin else None
    shape = shape_from_hf(read_config(home), str(home / "config.json")) if home else None
    weights = open_weights(folder, "RUN_OR_CHECKPOINT", shape)
    try:
        if isinstance(weights, NativeWeights):
            found = native_in.surroundings(weights, home, dtype)
        elif isinstance(weights, MegatronWeights):
            found = megatron_in.surroundings(weights, home, dtype)
        else:
            raise InputError("this is a Hugging Face folder already", str(folder), "give a run or a checkpoint")
        for note in found.notes:
            say(f"note: {note}")
        if dry_run:
            nbytes = stored_bytes(weights.tensors, DTYPES[dtype])
            facts = {"out": out, "tensors": len(weights.tensors), "bytes": nbytes, "dtype": dtype}
            return facts | {"source": weights.path, "notes": found.notes, "written": False}
        mark = json.dumps({"source": _digest(folder), "dtype": dtype}) + "\n"
        beside = replace(found.beside, texts={**found.beside.texts, MARK: mark})
        out.parent.mkdir(parents=True, exist_ok=True)
        with BytesBar("exporting") as bar:
            facts = export_hf(weights, out, dtype, beside, bar.update)
    finally:
        weights.close()
    return facts | {"source": weights.path, "notes": found.notes, "written": True}


@contextmanager
def exported(folder: Path, target: Path, dry_run: bool = False) -> Iterator[Path]:
    """The export of a run or checkpoint: the one at its default place, or else one made beside `target` for the while.

    The checkpoint itself is only read. What is made goes when the `with` ends, unless an unfinished `target` needs it:
    the same command then uses it again.

    Args:
        target: what will be made of the export.
        dry_run: make nothing.

    Raises:
        InputError: what is there was not made of this checkpoint as it is now, or has another dtype; or there is
            nothing and nothing may be made.
    """
    from infir2_core.errors import InputError

    if (lasting := default_out(folder)).exists():
        yield _made_of(folder, lasting)
        return
    if dry_run:
        raise InputError("the run is not exported yet", str(folder), f"infir2 convert to-hf {folder}")
    passing = beside(target, "-bf16.partial")
    if passing.exists():
        _made_of(folder, passing)
    else:
        export(folder, passing)
    try:
        yield passing
    finally:
        if not beside(target, ".partial").exists():
            shutil.rmtree(passing, ignore_errors=True)


def _made_of(folder: Path, out: Path) -> Path:
    """`out`, an export of the checkpoint `folder` as it is now; InputError when it is none."""
    from infir2_core.errors import InputError

    try:
        mark = json.loads((out / MARK).read_text(encoding="utf-8"))
        source, dtype = mark["source"], mark["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        source, dtype = "", DTYPE
    if source != _digest(folder):
        what = "an export is there that was not made of this checkpoint as it is now"
    elif dtype != DTYPE:
        what = f"an export is there whose weights are {dtype}, not {DTYPE}"
    else:
        return out
    hint = f"rm -r {out}  to have it made anew; to cast that folder as it is: infir2 cast-fp8 {out}"
    raise InputError(what, str(out), hint)


def _digest(folder: Path) -> str:
    """Changes when a checkpoint does: of the hashes in our manifest, or of sizes and times of Megatron's files."""
    from infir2_core.config.source import open_native
    from infir2_core.convert.megatron.dist import find_iteration, is_megatron
    from infir2_core.train.manifest import read_manifest

    found: dict[str, Any]
    if is_megatron(folder):
        files = [path for path in find_iteration(folder, str(folder)).iterdir() if path.is_file()]
        found = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    else:
        found = read_manifest(open_native(folder, str(folder)).path)["files"]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
