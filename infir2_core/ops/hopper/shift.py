"""Column copies from the codes of row copies (reference: ops/reference/quantize.py, `shifted`; kernel: cuda/shift.cu).

A byte an element is read and one is written, where a copy from the bf16 source would read two and need the source.
"""

from __future__ import annotations

from ...precision.spec import QSpec
from ..reference.quantize import QTensor
from .copies import TILE, Copies, arguments, defines
from .cuda import launch
from .gemm import laid_out

THREADS = 256


def supports(q: QTensor, spec: QSpec) -> bool:
    """Whether `shifted` takes this row copy: 1x128 blocks as ops/hopper/copies.py lays them, 128 rows or a multiple."""
    fits = laid_out(q) and q.tile == (1, TILE) and q.data.shape[0] % TILE == 0
    return fits and spec.shifts_from(q.spec) and spec.block in ((1, TILE), (TILE, TILE))


def shifted(q: QTensor, spec: QSpec) -> QTensor:
    """The column copy in the blocks of `spec`, contraction axis last, of a row copy [R, C]; `supports(q, spec)`."""
    rows, cols = q.data.shape
    made = Copies.allocate((rows, cols), None, spec, q.data.device).col
    assert made is not None
    constants = defines(q, made) | {"SQUARE": int(spec.block == (TILE, TILE))}
    tiles = rows // TILE * (cols // TILE)
    fields = (cols, arguments(q), arguments(made))
    launch("shift.cu", tuple(sorted(constants.items())), tiles, THREADS, 0, fields, q.data.device)
    return made
