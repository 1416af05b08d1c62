"""`infir2 init [DIR]`: a commented infir2.toml to start a project from, or one made of Megatron's arguments.

Writes that one file and nothing else; an existing one is left alone unless `--force` is given.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infir2_cli.output import DebugFlag, JsonFlag, emit, guarded, say
from infir2_core.errors import InputError, UsageError, nearest

if TYPE_CHECKING:
    from infir2_core.convert.megatron.project import Imported

FILE = "infir2.toml"


@guarded
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the project, made when absent.")] = Path("."),
    size: Annotated[str, typer.Option("--size", help="Size of the model: tiny, small, 0.5b, 1.5b, 3b or 7b.")] = "tiny",
    from_megatron: Annotated[
        Path | None, typer.Option(metavar="CKPT", help="Take the settings inside a torch_dist checkpoint.")
    ] = None,
    from_script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take those of a Megatron or slime launch script; not run.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an infir2.toml that is already there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file instead of writing it.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Write a commented infir2.toml."""
    path = folder / FILE
    name = folder.absolute().name or "project"
    if from_megatron is not None and from_script is not None:
        where = "--from-megatron, --from-script"
        raise UsageError("two sources of settings exclude each other", where, "keep one of them")
    imported = _import(from_megatron, from_script)
    text = imported_text(name, imported) if imported else project_text(name, size)
    if folder.exists() and not folder.is_dir():
        raise InputError("this is a file, not a folder", str(folder), "infir2 init OTHER_FOLDER")
    if path.exists() and not force and not dry_run:
        raise InputError("there is a project file already", str(path), "add --force to replace it")
    if not dry_run:
        _write(path, text)

    def human() -> None:
        if dry_run:
            say(text.rstrip("\n"))
        if imported:
            _say_left(imported)
        if dry_run:
            return
        say(f"wrote {path}")
        if folder.absolute() != Path.cwd():
            say(f"next: cd {folder}")
        if imported and imported.sft:
            say(f"next: infir2 sft --stage {min(imported.sft)} --dry-run")
            return
        if imported and imported.rl:
            say(f"[rl.{min(imported.rl)}] was read and checked; no command trains by it in this version")
            return
        if not imported or not imported.data:
            say("next: infir2 data prepare SOURCE --out data/text")
        say("next: infir2 cpt")

    result = {"path": path, "size": imported.size if imported else size, "written": not dry_run, "text": text}
    if imported:
        result |= {"stage": imported.stage, "not_carried_over": imported.left, "notes": imported.notes}
    emit(result, human)


def _write(path: Path, text: str) -> None:
    from infir2_core.convert.staging import write_text

    made = [place for place in path.parents if not place.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except BaseException:
        for place in made:  # a disk without room must not leave empty folders
            with suppress(OSError):
                place.rmdir()
        raise


def project_text(name: str, size: str) -> str:
    """The project file of a project called `name` that trains a model of `size`.

    Raises:
        UsageError: no such size.
    """
    from infir2_core.config.schema import SCRATCH_SIZES, SIZES
    from infir2_core.templates import render

    if size not in SIZES:
        raise UsageError(f"no such size: {size}", "--size", nearest(size, SIZES))
    source = "" if size in SCRATCH_SIZES else f"Qwen/Qwen2.5-{size.upper()}"
    return render("project/infir2.toml.j2", name=name, size=size, sizes=SIZES, source=source)


def _import(checkpoint: Path | None, script: Path | None) -> Imported | None:
    if checkpoint is None and script is None:
        return None
    from infir2_core.convert.megatron import project

    return project.from_checkpoint(checkpoint) if checkpoint else project.from_script(script or Path())


def imported_text(name: str, imported: Imported) -> str:
    """The project file of settings that were taken from elsewhere."""
    import tomli_w

    from infir2_core.templates import render

    settings = {"cpt": imported.cpt, "sft": imported.sft, "rl": imported.rl}[imported.stage]
    stage = {imported.stage: settings}
    body = tomli_w.dumps({"data": imported.data, **stage} if imported.data else stage)
    values = {"origin": Path(imported.origin).name, "size": imported.size, "source": imported.source}
    return render("project/imported.toml.j2", name=name, body=body.rstrip("\n"), **values)


def _say_left(imported: Imported) -> None:
    for note in imported.notes:
        say(f"note: {note}")
    if imported.left:
        say(f"not carried over, {len(imported.left)} arguments:")
    for argument, reason in imported.left.items():
        say(f"  --{argument.replace('_', '-')}: {reason}")
