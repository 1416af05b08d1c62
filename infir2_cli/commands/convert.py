"""`infir2 convert verify`: whether a folder is what its config says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..output import DebugFlag, JsonFlag, emit, guarded, say

app = typer.Typer(help="Move checkpoints between formats, and check them.", no_args_is_help=True)


@app.command("verify")
@guarded
def verify(
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder, FP8 or not.", show_default=False)],
    headers: Annotated[bool, typer.Option("--headers", help="Look at headers only, not at every value.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Check every tensor, scale and index entry of a folder before an engine loads it."""
    from infir2_core.convert import verify as work
    from infir2_core.errors import InputError

    from ..progress import BytesBar

    with BytesBar("checking") as bar:
        verdict = work.verify(folder, not headers, bar.update)

    def human() -> None:
        for problem in verdict.problems:
            say(f"- {problem}")
        if not verdict.problems:
            say(f"{folder}: sound, {verdict.kind}, {verdict.tensors:,} tensors, {verdict.nbytes / 1e9:.2f} GB")

    emit(verdict.as_dict(), human)
    if verdict.problems:
        raise typer.Exit(InputError.exit_code)
