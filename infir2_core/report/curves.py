"""Curves of one or several runs as a PNG: loss, learning rate, throughput, memory.

Drawn from metrics.jsonl alone. The training loss appears twice, raw and faint below a running mean, and the held-out
loss as markers on the same axes; steps without a finite value are gaps, never zeros. Colours are the Okabe-Ito set,
which people with any form of colour blindness can tell apart; line styles differ too, for printing in grey.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import InputError
from ..runs import Run, values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Axis = Literal["steps", "tokens"]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")
DOTS_PER_INCH = 130


def draw(runs: list[Run], axis: Axis = "steps") -> Figure:
    """A figure with all `runs` in it: loss on top (and, for several runs, how far their held-out losses are from the
    one that is named before the others), learning rate, throughput and memory below.

    Args:
        runs: at least one, in the order of the legend.
        axis: what the horizontal axes count.

    Raises:
        InputError: none of the runs has a training step yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if not any(run.steps for run in runs):
        raise InputError(
            f"there is nothing to draw yet in {', '.join(run.name for run in runs)}", "", "infir2 runs list"
        )
    figure = Figure(figsize=(11, 7.6), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=(1.9, 1))
    compared = len(runs) > 1 and any(differences(runs[0], run) for run in runs[1:])
    loss = figure.add_subplot(grid[0, :2] if compared else grid[0, :])
    lr, throughput, memory = (figure.add_subplot(grid[1, column]) for column in range(3))
    for index, run in enumerate(runs):
        style = _style(index)
        _draw_loss(loss, run, axis, style)
        _plot(lr, run, "lr", axis, style, smoothed=False)
        _plot(throughput, run, "tok_per_s", axis, style, smoothed=True)
        _plot(memory, run, "memory_gb", axis, style, smoothed=False)
    _frame(loss, "Loss: training (line) and held-out (markers)", "nats per token", axis)
    _limit_loss(loss, runs)
    loss.legend(frameon=False, fontsize=8.5, loc="upper right")
    _frame(lr, "Learning rate", "", axis)
    _frame(throughput, "Throughput", "tokens / s", axis)
    _frame(memory, "Memory, peak", "GB", axis)
    for panel, runs_key in ((lr, "lr"), (throughput, "tok_per_s"), (memory, "memory_gb")):
        _from_zero(panel, max((max(values(run.steps, runs_key), default=0.0) for run in runs), default=0.0))
    lr.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    if compared:
        _draw_differences(figure.add_subplot(grid[0, 2]), runs, axis)
    return figure


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def png(runs: list[Run], axis: Axis = "steps") -> bytes:
    """`draw` as PNG bytes."""
    buffer = io.BytesIO()
    draw(runs, axis).savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()


def write_png(runs: list[Run], path: Path, axis: Axis = "steps") -> None:
    """`draw` into a file.

    Raises:
        InputError: nothing to draw, or the file cannot be written.
    """
    data = png(runs, axis)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"the picture cannot be written: {error.strerror}", str(path)) from error


def smooth(losses: list[float], width: int) -> list[float]:
    """Centred running mean over up to `width` neighbours; NaNs are left out of each mean, not spread."""
    half = width // 2
    means = []
    for index in range(len(losses)):
        near = [value for value in losses[max(0, index - half) : index + half + 1] if not math.isnan(value)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def differences(base: Run, other: Run) -> list[tuple[int, float, float]]:
    """(step, held-out loss of `base`, of `other`) at every step where both were evaluated."""
    known = {record["step"]: record["loss"] for record in base.evals if values([record], "loss")}
    mine = {record["step"]: record["loss"] for record in other.evals if values([record], "loss")}
    return [(step, known[step], mine[step]) for step in sorted(known.keys() & mine.keys())]


def _series(records: list[dict[str, Any]], key: str, axis: Axis) -> tuple[list[float], list[float]]:
    """x and y for a plot; y is NaN where `key` is absent or null, and records without an x are left out."""
    place = "step" if axis == "steps" else "tokens"
    known = [record for record in records if values([record], place)]
    return [record[place] for record in known], [next(iter(values([r], key)), math.nan) for r in known]


def _plot(panel: Axes, run: Run, key: str, axis: Axis, style: dict[str, Any], smoothed: bool) -> None:
    x, y = _series(run.steps, key, axis)
    if smoothed:
        panel.plot(x, y, color=style["color"], alpha=0.22, linewidth=0.8)
        # A window of 2 % of the run shows the trend and keeps the shape of warm-up and decay.
        y = smooth(y, max(1, len(y) // 50))
    panel.plot(x, y, linewidth=1.6, **style)


def _draw_loss(panel: Axes, run: Run, axis: Axis, style: dict[str, Any]) -> None:
    _plot(panel, run, "loss", axis, style, smoothed=True)
    panel.lines[-1].set_label(f"{run.name} ({run.recipe})")
    x, y = _series(run.evals, "loss", axis)
    if x:
        marker = MARKERS[COLOURS.index(style["color"]) % len(MARKERS)]
        final = next((value for value in reversed(y) if not math.isnan(value)), None)
        label = "held-out" + (f", last {final:.4f}" if final is not None else "")
        panel.plot(x, y, marker, color=style["color"], markersize=6, markerfacecolor="none", label=label)


def _draw_differences(panel: Axes, runs: list[Run], axis: Axis) -> None:
    panel.axhline(0, color=COLOURS[0], linewidth=1.2)
    for index, run in enumerate(runs[1:], start=1):
        pairs = differences(runs[0], run)
        place = {record["step"]: record.get("tokens") for record in run.evals}
        points = [(place[step] if axis == "tokens" else step, 100 * (b / a - 1)) for step, a, b in pairs if a]
        shown = [(x, y) for x, y in points if x is not None]
        marker = MARKERS[index % len(COLOURS) % len(MARKERS)]
        panel.plot(
            [x for x, _ in shown], [y for _, y in shown], marker=marker, markersize=4, linewidth=1.2, **_style(index)
        )
    name = runs[0].name if len(runs[0].name) <= 36 else runs[0].name[:35] + "…"
    _frame(panel, f"Held-out loss against that of\n{name}", "difference, %", axis)


def _limit_loss(panel: Axes, runs: list[Run]) -> None:
    """Give the panel to the part of the curves where something can be compared: a spike or the loss of random weights
    would press everything else into a thin band."""
    tails = sorted(value for run in runs for value in values(run.steps, "loss")[len(run.steps) // 20 :])
    if len(tails) < 40:
        return
    low, high = tails[0], tails[int(0.995 * (len(tails) - 1))]
    margin = 0.08 * (high - low) or 0.1
    panel.set_ylim(low - margin, high + margin)


def _frame(panel: Axes, title: str, unit: str, axis: Axis) -> None:
    from matplotlib.ticker import EngFormatter

    panel.set_title(title, fontsize=10, loc="left")
    panel.set_ylabel(unit, fontsize=9)
    panel.set_xlabel("step" if axis == "steps" else "tokens", fontsize=9)
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    if axis == "tokens":
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    if unit == "tokens / s":
        panel.yaxis.set_major_formatter(EngFormatter(sep=""))


def _from_zero(panel: Axes, highest: float) -> None:
    """Begin at zero, so that the height of a curve can be read as a ratio; say so when there is no curve."""
    panel.set_ylim(0, 1.1 * highest or 1.0)
    if not highest:
        panel.set_xticks([])
        panel.set_yticks([])
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", fontsize=9, alpha=0.6)
