"""Picture and page of a comparison of steps (bench/compare.py)."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

from ..bench.arm import PHASES
from ..bench.compare import Row
from ..errors import InputError
from .curves import COLOURS, DOTS_PER_INCH
from .page import STYLE, html_table

COLUMNS = [
    "arm",
    "forward",
    "backward",
    "fwd + bwd",
    "ratio",
    "optimizer",
    "step",
    "ratio",
    "tok/s",
    "TFLOPS",
    "ratio",
    "peak GB",
    "ratio",
]


def table_rows(rows: list[Row], spread: bool = True) -> list[list[str]]:
    """Cells of the comparison, one list for each arm, under `COLUMNS`."""
    made = []
    for row in rows:
        if row.failed:
            made.append([row.name, row.failed, *[""] * (len(COLUMNS) - 2)])
            continue

        def time(phase: str, row: Row = row) -> str:
            low, high = row.spread[phase]
            return f"{row.ms[phase]:.1f}" + (f" ({low:.1f}-{high:.1f})" if spread else "")

        memory = "-" if row.peak_gb is None else f"{row.peak_gb:.1f}"
        if row.reserved_gb is not None:
            memory += f" ({row.reserved_gb:.1f} reserved)"
        made.append(
            [
                row.name,
                time("forward"),
                time("backward"),
                time("forward+backward"),
                _ratio(row, "forward+backward"),
                f"{row.ms['optimizer']:.1f}",
                time("step"),
                _ratio(row, "step"),
                f"{row.tok_per_s:,.0f}",
                f"{row.tflops:.1f}",
                _ratio(row, "tok_per_s"),
                memory,
                _ratio(row, "peak_gb"),
            ]
        )
    return made


def _ratio(row: Row, key: str) -> str:
    return f"{row.ratio[key]:.2f}" if key in row.ratio else "-"


def png(rows: list[Row], title: str) -> bytes:
    """Bars of forward, backward and optimizer, one for each arm that has figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if not row.failed]
    figure = Figure(figsize=(9, 1.4 + 0.55 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    left = [0.0] * len(shown)
    for colour, phase in zip(COLOURS, PHASES, strict=False):
        widths = [row.ms[phase] for row in shown]
        axes.barh([row.name for row in shown], widths, left=left, color=colour, label=phase, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, (row, end) in enumerate(zip(shown, left, strict=True)):
        axes.text(end, y, f"  {row.tok_per_s:,.0f} tok/s", va="center")
    axes.set(title=title, xlabel="milliseconds, medians", xlim=(0, 1.25 * max(left)))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()


def page(title: str, notes: list[str], tables: dict[str, tuple[list[str], list[list[str]]]], picture: bytes) -> str:
    """One self-contained HTML page: title, remarks, the picture, and named tables of (head, rows)."""
    drawn = base64.b64encode(picture).decode()
    parts = [f"<h1>{html.escape(title)}</h1>", *(f'<p class="quiet">{html.escape(note)}</p>' for note in notes)]
    parts.append(f'<img alt="step times" src="data:image/png;base64,{drawn}">')
    for name, (columns, rows) in tables.items():
        parts += [f"<h2>{html.escape(name)}</h2>", html_table(columns, rows)]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html>\n<html>{head}<body>\n" + "\n".join(parts) + "\n</body></html>\n"


def write(folder: Path, stem: str, data: Any, picture: bytes, text: str) -> list[Path]:
    """Writes STEM.json, .png and .html and returns their paths.

    Raises:
        InputError: the folder cannot be written.
    """
    paths = [folder / f"{stem}{suffix}" for suffix in (".json", ".png", ".html")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        paths[1].write_bytes(picture)
        paths[2].write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"the results cannot be written: {error.strerror}", str(folder), "--out FOLDER") from error
    return paths
