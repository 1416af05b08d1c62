"""`infir2 convert to-hf|from-hf|check|verify`: checkpoints between formats, and whether they are sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from infir2_core.errors import InputError, UsageError, nearest

from ..output import DebugFlag, JsonFlag, emit, guarded, say

app = typer.Typer(help="Move checkpoints between formats, and check them.", no_args_is_help=True)

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN_OR_CHECKPOINT", help="Ours or Megatron's; default: the run written to last.", show_default=False
    ),
]
Out = Annotated[Path | None, typer.Argument(metavar="OUT", help="Default: RUN/hf/step-N.", show_default=False)]


@app.command("to-hf")
@guarded
def to_hf(
    source: Source = None,
    out: Out = None,
    origin: Annotated[
        str | None, typer.Option(help="Hugging Face folder or hub id that gives config, tokenizer and licence.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Export a run or checkpoint as a Hugging Face folder. The same command again finishes an interrupted one."""
    from infir2_core.convert.export import DTYPES

    from ..exporting import default_out, export, find_source

    if dtype not in DTYPES:
        raise UsageError(f"no dtype '{dtype}'", "--dtype", nearest(dtype, DTYPES))
    folder = find_source(source, "RUN_OR_CHECKPOINT")
    facts = export(folder, out or default_out(folder), origin, dtype)

    def human() -> None:
        say(f"wrote {facts['out']}: {facts['tensors']:,} tensors, {facts['bytes'] / 1e9:.2f} GB in {dtype}")
        say(f"next: infir2 cast-fp8 {facts['out']}")

    emit(facts, human)


@app.command("from-hf")
@guarded
def from_hf(
    source: Annotated[str, typer.Argument(metavar="HF_DIR", help="Hugging Face folder or hub id.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Checkpoint folder to write.", show_default=False)],
    layout: Annotated[str, typer.Option(help="native, or megatron (torch_dist).")] = "native",
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Write a Hugging Face model as a checkpoint that training starts from."""
    from infir2_core.convert.megatron.write import export_megatron
    from infir2_core.convert.native_out import export_native
    from infir2_core.convert.sources import model_folder
    from infir2_core.convert.staging import check_out
    from infir2_core.convert.weights import HFWeights

    from ..progress import BytesBar

    if layout not in (writers := {"native": export_native, "megatron": export_megatron}):
        raise UsageError(f"no layout '{layout}'", "--layout", nearest(layout, writers))
    folder = model_folder(source, "HF_DIR")
    check_out(out, folder)
    weights = HFWeights(folder, trained=True)
    with BytesBar("converting") as bar:
        facts = writers[layout](weights, out, bar.update)
    weights.close()
    emit(facts, lambda: say(f"wrote {out}: {facts['tensors']:,} tensors, {facts['bytes'] / 1e9:.2f} GB, {layout}"))


@app.command("check")
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


@app.command("verify")
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
        if not verdict.problems:
            say(f"{folder}: sound, {verdict.kind}, {verdict.tensors:,} tensors, {verdict.nbytes / 1e9:.2f} GB")

    emit(verdict.as_dict(), human)
    if verdict.problems:
        raise typer.Exit(InputError.exit_code)
