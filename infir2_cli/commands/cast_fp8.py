"""`infir2 cast-fp8`: an FP8 folder for SGLang, vLLM and transformers. Parse, plan, run."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from ..output import DebugFlag, JsonFlag, emit, guarded, say, table


@guarded
def cast_fp8(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="HF_DIR",
            help="Hugging Face folder, hub id, run or checkpoint; default: the run written to last.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder to write; default: HF_DIR-fp8.", show_default=False)
    ] = None,
    pow2_scale: Annotated[
        bool | None,
        typer.Option(
            "--pow2-scale/--no-pow2-scale",
            help="Power-of-two or float32 scales; default: as the source's recipe.json says, else float32.",
        ),
    ] = None,
    block: Annotated[str, typer.Option(help="Rows,columns that share a scale.")] = "128,128",
    keep: Annotated[list[str] | None, typer.Option(help="Glob of modules to leave alone; may be repeated.")] = None,
    scale_fmt: Annotated[str, typer.Option(help="ue8m0: declare power-of-two scales in config.json.")] = "",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda when there is one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Cast the linear layers of a model to block FP8. The same command again finishes an interrupted one."""
    from infir2_core.convert.cast import cast
    from infir2_core.convert.cast_plan import plan_cast
    from infir2_core.convert.folder import open_folder
    from infir2_core.convert.staging import check_out
    from infir2_core.machine import pick_device

    from ..exporting import beside, default_out, exported, find_source

    chosen, size = pick_device(device), _block(block)
    folder = find_source(source, "HF_DIR")
    ready = (folder / "config.json").is_file()
    fetched = source is not None and "/" in source and not Path(source).expanduser().exists()  # in the hub's cache
    default = Path(f"{str(source).split('/')[-1]}-fp8") if fetched else None
    target = (out or default or beside(folder if ready else default_out(folder), "-fp8")).expanduser()
    check_out(target, folder if ready else None)
    with nullcontext(folder) if ready else exported(folder, target, dry_run) as weights:
        plan = plan_cast(open_folder(weights), pow2_scale, size, tuple(keep or ()), scale_fmt)
        facts = plan.as_dict() | {"source": str(folder), "out": target}
        if dry_run:
            emit(facts, lambda: _show_plan(facts))
            return
        from ..progress import BytesBar

        with BytesBar("casting") as bar:

            def checked(done: int, total: int) -> None:
                bar.update(done, total, "checking")

            report = cast(plan, target, chosen, bar.update, checked)
    emit(facts | report, lambda: _show_report(target, report))


def _block(text: str) -> tuple[int, int]:
    from infir2_core.errors import UsageError

    match = re.fullmatch(r"\s*([0-9]{1,18})\s*,\s*([0-9]{1,18})\s*", text)
    if match is None:
        raise UsageError(f"'{text}' is no block size", "--block", "--block 128,128")
    return int(match[1]), int(match[2])


def _show_plan(facts: dict[str, Any]) -> None:
    rows = [
        ["from", facts["source"]],
        ["to", str(facts["out"])],
        ["weights cast", f"{facts['cast']:,}, block {facts['quantization_config']['weight_block_size']}"],
        ["shards", f"{len(facts['shards'])}, {facts['input_bytes'] / 1e9:.2f} GB in"],
        ["disk", f"{facts['output_bytes'] / 1e9:.2f} GB out"],
        ["files copied", ", ".join(facts["side_files"]) or "none"],
        *([name, f"kept ({why})"] for name, why in facts["kept"].items()),
        *(["note", note] for note in facts["notes"]),
    ]
    table("Plan (nothing was written)", ["", ""], rows)


def _show_report(out: Path, report: dict[str, Any]) -> None:
    rows = [
        [name, f"{layer['relative_error']:.5f}", f"{layer['underflow']:.2e}"]
        for name, layer in [*report["layers"].items(), ("all", report["total"])]
    ]
    table("Cast weights", ["layer", "relative error", "underflow"], rows)
    for note in report["notes"]:
        say(f"note: {note}")
    say(f"wrote {out} ({report['output_bytes'] / 1e9:.2f} GB) and checked it; each weight: {out / 'cast_report.json'}")
