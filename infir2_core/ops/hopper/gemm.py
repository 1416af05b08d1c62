"""Block-scaled FP8 GEMM by cuBLASLt (through torch), DeepGEMM or wgrad.py, whichever is fastest for the shape.

Reference: ops/reference/matmul.py. Both operands have their contraction axis contiguous. Float32 partial sums of 128
products are multiplied by both scales and added in float32; the two libraries gave the same bits wherever they were
compared, and so does wgrad.py for tiles that it does not share out along K. Which is fastest is read from a table of
measured rates (gemm_table.json, written by `infir2 bench gemm --tune`; INFIR2_GEMM_TABLE names another one): the entry
of the nearest shape decides.

Padding of 128x128 scales to four along the contraction is what older stacks missed: without it, K / 128 not divisible
by four gave silently wrong numbers.
"""

from __future__ import annotations

import json
import math
import os
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ..optional import optional
from ..reference.quantize import QTensor
from .copies import K_BLOCK_PAD, TILE
from .wgrad import matmul_tiles

try:
    from torch.nn.functional import ScalingType
except ImportError:  # an older torch: nothing here is supported then
    ScalingType = None  # type: ignore[assignment, misc]

CUBLASLT, DEEPGEMM, OWN = "cublaslt", "deepgemm", "infir2"
TABLE = Path(__file__).with_name("gemm_table.json")


def supports(a: QTensor, b: QTensor) -> bool:
    """Whether `scaled_matmul` takes these operands: in 1x128 blocks, one of them also in 128x128, laid out by
    ops/hopper/copies.py.
    """
    if ScalingType is None or not (laid_out(a) and laid_out(b)) or (1, TILE) not in (a.tile, b.tile):
        return False
    if a.spec.format == b.spec.format == "e5m2":
        return False
    return all(side % 16 == 0 for side in (*a.data.shape, *b.data.shape))


def choices(a: QTensor, b: QTensor, out_dtype: torch.dtype) -> list[str]:
    """Who computes this product here, cuBLASLt always among them.

    DeepGEMM's kernels take E4M3, 1x128 on the left, and store bf16 for a 128x128 right operand, float32 for
    a 1x128 one. Our own kernel takes 1x128 by 1x128 and stores float32.
    """
    dtype = torch.bfloat16 if b.tile == (TILE, TILE) else torch.float32
    found, tiles = [CUBLASLT], a.tile == (1, TILE)
    if not min(*a.data.shape, *b.data.shape):
        return found
    fits = out_dtype == dtype and a.spec.format == b.spec.format == "e4m3" and tiles
    if fits and all(side % TILE == 0 for side in (*a.data.shape, *b.data.shape)) and _deep_gemm() is not None:
        found.append(DEEPGEMM)
    if tiles and b.tile == (1, TILE) and out_dtype == torch.float32:
        found.append(OWN)
    return found


def choose(a: QTensor, b: QTensor, out_dtype: torch.dtype) -> str:
    """Whom the table calls fastest for these operands, [M, K] and [N, K]."""
    found = choices(a, b, out_dtype)
    if len(found) == 1:
        return found[0]
    kind = "2d" if b.tile == (TILE, TILE) else "1d"
    return fastest(kind, a.data.shape[0], b.data.shape[0], a.data.shape[1], tuple(found))


def scaled_matmul(
    a: QTensor,
    b: QTensor,
    out_dtype: torch.dtype,
    by: str | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """a . b^T; a [M, K], b [N, K], `supports(a, b)`.

    Args:
        a: left operand.
        b: right operand.
        out_dtype: bfloat16 or float32.
        by: one of `choices`; None: that of `choose`.
        total: [M, N] in `out_dtype`, to which the product is added in place, and which is returned then.
    """
    by = by or choose(a, b, out_dtype)
    if by == OWN:
        if total is None or (total.is_contiguous() and total.data_ptr() % 16 == 0):
            return matmul_tiles(a, b, total)
        return total.add_(matmul_tiles(a, b))
    if by == DEEPGEMM:
        return _by_deepgemm(a, b, out_dtype, total)
    out = F.scaled_mm(a.data, b.data.T, _scale(a), _kind(a), _scale(b), _kind(b), output_dtype=out_dtype)
    return out if total is None else total.add_(out)


def _by_deepgemm(a: QTensor, b: QTensor, out_dtype: torch.dtype, total: Tensor | None) -> Tensor:
    library: Any = _deep_gemm()
    shape = (a.data.shape[0], b.data.shape[0])
    if b.tile == (TILE, TILE):
        out = torch.empty(shape, dtype=out_dtype, device=a.data.device)
        scale = b.scale.contiguous()  # without the padding that cuBLASLt wants
        library.fp8_gemm_nt((a.data, a.scale), (b.data, scale), out, disable_ue8m0_cast=True)
        return out if total is None else total.add_(out)
    # Its kernel adds to what is there.
    out = torch.zeros(shape, dtype=out_dtype, device=a.data.device) if total is None else total
    library.fp8_gemm_nt((a.data, a.scale), (b.data, b.scale), out, c=out, recipe=(1, 1, TILE), disable_ue8m0_cast=True)
    return out


@cache
def fastest(kind: str, m: int, n: int, k: int, among: tuple[str, ...]) -> str:
    """The fastest for the tabled shape nearest to [m, k] . [n, k]^T; distances are those of logarithms.

    Args:
        kind: `2d` (1x128 by 128x128) or `1d` (1x128 by 1x128).
        m: rows of the left operand.
        n: rows of the right operand.
        k: contraction.
        among: whom to choose from, cuBLASLt where the table has no rate of them.
    """

    def distance(entry: dict[str, Any]) -> float:
        return sum(abs(math.log2(entry[name] / side)) for name, side in (("m", m), ("n", n), ("k", k)))

    entries = [entry for entry in table() if entry["kind"] == kind]
    if not entries:
        return CUBLASLT
    tflops: dict[str, float] = min(entries, key=distance)["tflops"]
    return max((name for name in among if name in tflops), key=lambda name: tflops[name], default=CUBLASLT)


@cache
def table() -> list[dict[str, Any]]:
    """Measured rates: kind, m, n, k and `tflops` by library.

    Raises:
        InputError: the file is no such table.
    """
    path = Path(os.environ.get("INFIR2_GEMM_TABLE") or TABLE)
    try:
        shapes = json.loads(path.read_text(encoding="utf-8"))["shapes"]
        for entry in shapes:
            if min(entry["m"], entry["n"], entry["k"]) < 1 or entry["kind"] not in ("1d", "2d"):
                raise ValueError(f"{entry}: no shape of a GEMM")
            if not entry["tflops"].keys() or not entry["tflops"].keys() <= {CUBLASLT, DEEPGEMM, OWN}:
                raise ValueError(f"{entry}: no rates of {CUBLASLT}, {DEEPGEMM} and {OWN}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "unset INFIR2_GEMM_TABLE, or write one: infir2 bench gemm --tune FILE"
        raise InputError(f"the table of GEMM rates cannot be read: {error}", str(path), hint) from error
    return list(shapes)


def _deep_gemm() -> ModuleType | None:
    return optional("deep_gemm", "all FP8 GEMMs run by cuBLASLt")


def laid_out(q: QTensor) -> bool:
    """Whether codes and scales lie as the kernels of this folder lay them."""
    if q.axis != 1 or not q.data.is_contiguous() or q.tile not in ((1, TILE), (TILE, TILE)):
        return False
    rows, contraction = q.data.shape
    if contraction % TILE:
        return False
    if q.tile == (1, TILE):
        return q.scale.stride() == (1, rows)
    return q.scale.stride() == (_padded(contraction), 1)


def _padded(contraction: int) -> int:
    return -(-(contraction // TILE) // K_BLOCK_PAD) * K_BLOCK_PAD


def _scale(q: QTensor) -> Tensor:
    """Scales as torch takes them: [rows, K blocks], rows contiguous, or [K blocks padded to four, row blocks]."""
    if q.tile == (1, TILE):
        return q.scale
    pitch = _padded(q.data.shape[1])
    return q.scale.as_strided((pitch, q.scale.shape[0]), (1, pitch))


def _kind(q: QTensor) -> ScalingType:
    return ScalingType.BlockWise1x128 if q.tile == (1, TILE) else ScalingType.BlockWise128x128
