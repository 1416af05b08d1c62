"""`infir2 init [DIR]`: a commented infir2.toml to start a project from.

Writes that one file and nothing else; an existing one is left alone unless `--force` is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infir2_cli.output import DebugFlag, JsonFlag, emit, guarded, say
from infir2_core.errors import InputError, UsageError, nearest

FILE = "infir2.toml"


@guarded
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the project, made when absent.")] = Path("."),
    size: Annotated[str, typer.Option("--size", help="Size of the model: tiny, small, 0.5b, 1.5b, 3b or 7b.")] = "tiny",
    force: Annotated[bool, typer.Option("--force", help="Replace an infir2.toml that is already there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file instead of writing it.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Write a commented infir2.toml."""
    path = folder / FILE
    text = project_text(folder.absolute().name or "project", size)
    if folder.exists() and not folder.is_dir():
        raise InputError("this is a file, not a folder", str(folder), "infir2 init OTHER_FOLDER")
    if path.exists() and not force and not dry_run:
        raise InputError("there is a project file already", str(path), "add --force to replace it")
    if not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".toml.tmp")  # a full disk must not leave half a project file
        try:
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def human() -> None:
        if dry_run:
            say(text.rstrip("\n"))
            return
        say(f"wrote {path}")
        if folder.absolute() != Path.cwd():
            say(f"next: cd {folder}")
        say("next: infir2 data prepare SOURCE --out data/text")
        say("next: infir2 cpt")

    emit({"path": path, "size": size, "written": not dry_run, "text": text}, human)


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
