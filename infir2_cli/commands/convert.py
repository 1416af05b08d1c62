"""`infir2 convert to-hf|from-hf`: checkpoints between formats; `check` and `verify` are in convert_check.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from infir2_core.errors import UsageError, nearest

from ..output import DebugFlag, JsonFlag, emit, guarded, say
from . import convert_check

app = typer.Typer(help="Move checkpoints between formats, and check them.", no_args_is_help=True)
app.command("check")(convert_check.check)
app.command("verify")(convert_check.verify)

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN_OR_CHECKPOINT", help="Ours or Megatron's; default: the run written to last.", show_default=False
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written and stop.")]
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
    dry_run: DryRun = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Export a run or checkpoint as a Hugging Face folder. The same command again finishes an interrupted one."""
    from infir2_core.convert.export import DTYPES

    from ..exporting import default_out, export, find_source

    if dtype not in DTYPES:
        raise UsageError(f"no dtype '{dtype}'", "--dtype", nearest(dtype, DTYPES))
    folder = find_source(source, "RUN_OR_CHECKPOINT")
    facts = export(folder, out.expanduser() if out else default_out(folder), origin, dtype, dry_run)

    def human() -> None:
        _show(facts, dry_run, f"in {dtype}")
        if not dry_run:
            say(f"next: infir2 cast-fp8 {facts['out']}")

    emit(facts, human)


@app.command("from-hf")
@guarded
def from_hf(
    source: Annotated[str, typer.Argument(metavar="HF_DIR", help="Hugging Face folder or hub id.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Checkpoint folder to write.", show_default=False)],
    layout: Annotated[str, typer.Option(help="native, or megatron (torch_dist).")] = "native",
    dry_run: DryRun = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Write a Hugging Face model as a checkpoint that training starts from."""
    import torch

    from infir2_core.convert.megatron.write import export_megatron
    from infir2_core.convert.native_out import export_native
    from infir2_core.convert.sources import model_folder
    from infir2_core.convert.staging import check_out
    from infir2_core.convert.weights import HFWeights, stored_bytes

    from ..progress import BytesBar

    if layout not in (writers := {"native": export_native, "megatron": export_megatron}):
        raise UsageError(f"no layout '{layout}'", "--layout", nearest(layout, writers))
    folder = model_folder(source, "HF_DIR")
    out = out.expanduser()
    check_out(out, folder)
    weights = HFWeights(folder, trained=True)
    if dry_run:
        nbytes = stored_bytes(weights.tensors, torch.float32 if layout == "native" else None)
        facts = {"out": out, "tensors": len(weights.tensors), "bytes": nbytes, "layout": layout}
    else:
        with BytesBar("converting") as bar:
            facts = writers[layout](weights, out, bar.update)
    weights.close()
    emit(facts | {"written": not dry_run}, lambda: _show(facts, dry_run, f"in layout {layout}"))


def _show(facts: dict[str, Any], dry_run: bool, how: str) -> None:
    verb, end = ("would write", " (nothing was written)") if dry_run else ("wrote", "")
    say(f"{verb} {facts['out']}: {facts['tensors']:,} tensors, {facts['bytes'] / 1e9:.2f} GB {how}{end}")
