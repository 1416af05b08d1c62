"""`infir2 bench bf16-vs-fp8|gemm`: what a step costs in BF16 and FP8 on this card, and what the card can do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ..output import DebugFlag, JsonFlag, emit, guarded, say, table

app = typer.Typer(help="Timed comparisons on this machine.", no_args_is_help=True)
Size = Annotated[str, typer.Option("--size", help="Preset whose shapes are measured.")]
SeqLen = Annotated[int, typer.Option("--seq-len", min=1, help="Tokens of a sequence.")]
Tune = Annotated[Path | None, typer.Option("--tune", help="Time FP8 GEMM libraries; write their table here.")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="Sequences of a microbatch.")]


def _note(text: str) -> None:
    say(text, "dim")


@app.command("bf16-vs-fp8")
@guarded
def bf16_vs_fp8(
    size: Size = "1.5b",
    seq_len: SeqLen = 8192,
    rows: Rows = 1,
    layers: Annotated[
        int, typer.Option("--layers", min=0, help="Layers instead of the preset's; 0: the preset's.")
    ] = 0,
    recipes: Annotated[str, typer.Option("--recipes", help="FP8 recipes to compare, separated by commas.")] = "infir2",
    peer: Annotated[str | None, typer.Option("--peer", help="Also measure `megatron-te`.")] = None,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Forward and backward only.")] = False,
    recompute: Annotated[str, typer.Option("--recompute", help="none, selective or full.")] = "none",
    after: Annotated[int, typer.Option("--after", min=0, help="Training steps before the timed ones.")] = 0,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of an arm in each turn.")] = 5,
    turns: Annotated[int, typer.Option("--turns", min=1, help="How often each arm has its turn.")] = 2,
    reference: Annotated[bool, typer.Option("--reference", help="Run without FP8 units, by reference.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 when a ratio is worse than the accepted one.")] = False,
    accept: Annotated[bool, typer.Option("--accept", help="Store these ratios as the accepted ones.")] = False,
    baselines: Annotated[Path, typer.Option("--baselines", help="Folder of accepted ratios.")] = Path(
        "benchmarks/baselines"
    ),
    out: Annotated[Path, typer.Option("--out", help="Folder for JSON, PNG and HTML.")] = Path("bench"),
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Forward, backward, memory and throughput of a training step: our BF16, FP8 recipes and a peer, in turns."""
    from infir2_core.bench import baseline, compare, story
    from infir2_core.bench.arm import ArmSpec
    from infir2_core.errors import Infir2Error
    from infir2_core.report import bench as report

    story.checked(recompute, peer, check and accept)
    card = story.card(reference, size)
    device = "cuda:0" if card.gpu else "cpu"
    spec = ArmSpec(size, "bf16", seq_len, rows, layers, not no_optimizer, steps=steps, after=after)
    spec = dataclasses.replace(spec, recompute=recompute, device=device, profile=card.gpu)
    arms = compare.arms(spec, [r.strip() for r in recipes.split(",") if r.strip()], peer is not None)
    found = compare.run(arms, turns, note=_note)
    told = story.tell(card, spec, found)
    key = baseline.key_of(spec)
    data = {
        "card": dataclasses.asdict(card),
        "settings": dataclasses.asdict(spec),
        "rows": [dataclasses.asdict(r) for r in found],
    }
    picture = report.png(found, told.title)
    tables = {"Milliseconds, medians (least-most)": (report.COLUMNS, report.table_rows(found)), **told.tables}
    paths = report.write(out, key, data | told.data, picture, report.page(told.title, told.notes, tables, picture))
    stored, worse, refused = baseline.path_for(baselines, card.name), list[baseline.Regression](), None
    try:
        worse = (
            baseline.regressions(stored, key, found, "forward+backward" if no_optimizer else "step") if check else []
        )
        if accept:
            baseline.accept(stored, key, found)
    except Infir2Error as error:
        refused = error  # told below what was measured, for nobody should have to measure it again

    def human() -> None:
        say(told.title, "bold")
        table("milliseconds, medians", report.COLUMNS, report.table_rows(found, spread=False))
        for name, (columns, cells) in told.tables.items():
            table(name, columns, cells)
        for line in told.notes:
            say(line)
        say("written: " + ", ".join(str(path) for path in paths))
        for w in worse:
            say(f"slower: {w.told()}", "red")

    if not (refused and json):
        emit(data | told.data | {"files": paths, "regressions": [dataclasses.asdict(w) for w in worse]}, human)
    if refused:
        raise refused
    if worse:
        raise typer.Exit(1)


@app.command("gemm")
@guarded
def gemm(
    size: Size = "1.5b",
    seq_len: SeqLen = 8192,
    rows: Rows = 2,
    tune: Tune = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Ceilings of this card for a model's shapes: GEMMs, attention, copy bandwidth, and the floor they set."""
    from infir2_core.bench import ceilings, story
    from infir2_core.config.presets import load_preset

    card = story.card(False, size)
    if tune is not None:
        return _tune(tune, size, seq_len * rows, card.name)
    found = ceilings.measure(load_preset(size).model, seq_len, rows, note=_note)

    def human() -> None:
        cells = [
            [role, gemm, *(f"{rates[p]:,.0f}" if p in rates else "-" for p in ("bf16", "fp8"))]
            for (role, gemm), rates in found.gemm_tflops.items()
        ]
        cells += [["attention", way, f"{rate:,.0f}", "-"] for way, rate in found.attention_tflops.items()]
        table(f"{card.name}: TFLOPS for {size}, {seq_len} x {rows} tokens", ["layer", "GEMM", "bf16", "fp8"], cells)
        say(f"copy: {found.copy_gb_per_s:,.0f} GB/s read plus written")
        for precision, load in found.gemm_load.items():
            say(f"while the {precision} GEMMs of the layers ran: {load.told()}")
        say(f"floor of forward and backward: bf16 {found.floor_ms['bf16']:.0f} ms, fp8 {found.floor_ms['fp8']:.0f} ms")

    rates = {f"{role} {gemm}": values for (role, gemm), values in found.gemm_tflops.items()}
    emit({**dataclasses.asdict(found), "gemm_tflops": rates, "card": dataclasses.asdict(card)}, human)


def _tune(path: Path, size: str, tokens: int, card: str) -> None:
    from infir2_core.bench import clocks, tune

    meter = clocks.Meter("cuda:0", clocks.CALL_S)
    entries = tune.measure(size, tokens, _note, meter)
    count = tune.merge(path, entries, tune.about(card, meter.load()))

    def human() -> None:
        table(f"{card}: TFLOPS of FP8 GEMMs", ["blocks", "m x n x k", *tune.LIBRARIES], tune.table_rows(entries))
        say(f"while they ran: {meter.load().told()}")
        say(f"{path} has {count} shapes; INFIR2_GEMM_TABLE={path} uses it")

    emit({"table": str(path), "shapes": entries, "load": dataclasses.asdict(meter.load())}, human)
