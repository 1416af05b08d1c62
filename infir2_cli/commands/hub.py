"""`infir2 hub pull|push|card`: models to and from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infir2_core.errors import UsageError

from ..output import DebugFlag, JsonFlag, emit, guarded, say, warn

app = typer.Typer(help="Fetch and publish models on the Hugging Face hub.", no_args_is_help=True)

HubId = Annotated[str, typer.Argument(metavar="HUB_ID", help="Such as OWNER/NAME.", show_default=False)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit; default: main.")]


@app.command("pull")
@guarded
def pull(
    hub_id: HubId,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder; default: the hub's cache.", show_default=False)
    ] = None,
    revision: Revision = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Download a model. The same command again continues a broken download."""
    from infir2_core import hub
    from infir2_core.convert.verify import verify

    folder = hub.pull(hub_id, out, revision)
    verdict = verify(folder, values=False)
    for problem in verdict.problems:
        warn(problem)
    emit({"folder": folder, "problems": verdict.problems}, lambda: say(str(folder)))


@app.command("push")
@guarded
def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Hugging Face folder.", show_default=False)],
    hub_id: HubId,
    private: Annotated[bool, typer.Option("--private", help="If the repository is made by this.")] = False,
    revision: Revision = None,
    pull_request: Annotated[bool, typer.Option("--pull-request", help="Propose it instead of committing.")] = False,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Upload with infir2",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the folder and list what would be sent.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Publish a folder that passes `infir2 convert verify`. The same command again continues a broken upload."""
    from infir2_core import hub
    from infir2_core.convert.verify import require

    from ..progress import BytesBar

    if not hub.HUB_ID.fullmatch(hub_id):
        raise UsageError(f"'{hub_id}' is no hub id", "HUB_ID", "OWNER/NAME")
    files = hub.files_to_push(folder)
    with BytesBar("checking") as bar:
        verdict = require(folder, watch=bar.update)
    if not (folder / "README.md").is_file():
        warn(f"no model card: infir2 hub card {folder} --write")
    if dry_run:
        listed = [{"file": str(file), "bytes": (folder / file).stat().st_size} for file in files]
        shown = "\n".join(f"{file['bytes']:>16,}  {file['file']}" for file in listed)
        emit({"files": listed, "hub_id": hub_id}, lambda: say(shown))
        return
    address = hub.push(folder, hub_id, private, revision, pull_request, message)
    emit(verdict.as_dict() | {"address": address}, lambda: say(f"{folder} is at {address}"))


@app.command("card")
@guarded
def card(
    source: Annotated[str, typer.Argument(metavar="FOLDER", help="Hugging Face folder or hub id.", show_default=False)],
    base_model: Annotated[
        str, typer.Option(help="Hub id it was made from; default: what was cast, or as its card says.")
    ] = "",
    licence: Annotated[str, typer.Option("--licence", "--license", help="Default: as its card says.")] = "",
    write: Annotated[bool, typer.Option("--write", help="Replace README.md instead of printing.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show the model card of a folder, with its FP8 cast measured, or write it."""
    from infir2_core.convert.card import CARD, folder_card
    from infir2_core.convert.sources import described
    from infir2_core.convert.staging import write_text

    folder = described(source, "FOLDER")
    if write and not Path(source).expanduser().is_dir():
        what, hint = "--write needs a folder of yours, not a copy in the hub's cache", f"infir2 hub pull {source} DIR"
        raise UsageError(what, "--write", hint)
    text = folder_card(folder, base_model, licence)
    if write:
        write_text(folder / CARD, text)
    shown = f"wrote {folder / CARD}" if write else text.rstrip("\n")
    emit({"card": text, "written": write}, lambda: say(shown))
