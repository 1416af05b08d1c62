"""`infir2 convert check|verify`: whether two models are equal, and whether a folder is sound."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from infir2_core.errors import InputError

from ..output import DebugFlag, JsonFlag, emit, guarded, say


@guarded
def check(
    a: Annotated[str, typer.Argument(metavar="A", help="Hugging Face folder, run, checkpoint or hub id.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same model in another format.")],
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Compare two models tensor by tensor, bit for bit, whatever formats they are in. Exit 3 when they differ."""
    from infir2_core.convert.compare import compare
    from infir2_core.convert.weights import open_weights

    from ..exporting import find_source
    from ..progress import BytesBar

    left, right = (open_weights(find_source(name, where), where) for name, where in ((a, "A"), (b, "B")))
    with BytesBar("comparing") as bar:
        result = compare(left, right, bar.update)
    emit(result, lambda: _show_comparison(a, b, result))
    if not result["equal"]:
        raise typer.Exit(InputError.exit_code)


def _show_comparison(a: str, b: str, result: dict[str, Any]) -> None:
    for pair in result["dtypes"]:
        say(f"note: dtypes {pair}: the wider one was rounded to the narrower one")
    for names, where in ((result["only_a"], a), (result["only_b"], b)):
        if names:
            say(f"only in {where}: {len(names)} tensors, such as {names[0]}")
    for name, (left, right) in result["shapes"].items():
        say(f"{name}: shape {left} in {a}, {right} in {b}")
    if first := result["first"]:
        say(f"the first difference is in {first['tensor']} at {first['at']}:")
        say(f"  {first['a']!r} in {a}, {first['b']!r} in {b}")
        say(f"{len(result['different'])} of {result['tensors']} tensors differ")
    if result["equal"]:
        say(f"equal: {result['tensors']:,} tensors, bit for bit")


@guarded
def verify(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Hugging Face folder or hub id, FP8 or not.", show_default=False)
    ],
    headers: Annotated[bool, typer.Option("--headers", help="Look at headers only, not at every value.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Check every tensor, scale and index entry of a folder before an engine loads it."""
    from infir2_core.convert import verify as work
    from infir2_core.convert.sources import model_folder

    from ..progress import BytesBar

    folder = model_folder(source, "FOLDER")
    with BytesBar("checking") as bar:
        verdict = work.verify(folder, not headers, bar.update)

    def human() -> None:
        for problem in verdict.problems:
            say(f"- {problem}")
        for note in verdict.notes:
            say(f"note: {note}")
        if not verdict.problems:
            say(f"{folder}: sound, {verdict.kind}, {verdict.tensors:,} tensors, {verdict.nbytes / 1e9:.2f} GB")

    emit(verdict.as_dict(), human)
    if verdict.problems:
        raise typer.Exit(InputError.exit_code)
