"""One-pass quantisation: a source is read once and both copies of its bf16 values are written.

Sources are a bf16 matrix, a norm of one, the SwiGLU product of gate and up, and the gradients of gate and up
(reference: ops/reference/quantize.py, after ops/reference/elementwise.py for all but the first). A tile of 128 x 128
elements holds whole blocks in both directions, so that one read of it yields the row copy (1x128 blocks along the
columns) and the column copy (1x128 blocks along the rows, or one block of 128x128). The kernels are cuda/tiles.cu and,
where both copies are in 128x128 blocks, cuda/square.cu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...precision.spec import QSpec, QuantPlan
from ..reference.matmul import Operand
from ..reference.quantize import QTensor, Quantized
from .copies import TILE, Copies, arguments, defines, supported
from .cuda import launch

THREADS = 256
STAGED_BYTES = TILE * 136 * 2  # of a staged tile: PITCH of cuda/tiles.cu
LOADED, NORMED, SWIGLU, SWIGLU_BACKWARD = range(4)
# Rows whose loads a thread issues together, threads of a block, and blocks of a multiprocessor: measured on an H200
# (benchmarks/LOG.md).
TUNING = {LOADED: (8, 256, 3), NORMED: (8, 256, 3), SWIGLU: (4, 256, 4), SWIGLU_BACKWARD: (4, 512, 2)}


def supports(x: Tensor, plan: QuantPlan) -> bool:
    """Whether `quantize` takes this source and plan."""
    fits = x.dim() == 2 and x.shape[0] % TILE == 0 and x.shape[1] % TILE == 0 and x.numel() > 0
    return fits and x.dtype == torch.bfloat16 and supported(plan.row, plan.col)


def quantize(x: Tensor, plan: QuantPlan, nonfinite: Tensor) -> Quantized:
    """Codes and scales of a [R, C] bf16 tensor, R and C multiples of 128.

    Args:
        x: bfloat16.
        plan: `supports(x, plan)` holds.
        nonfinite: int64 scalar on the device, to which infinities and NaNs of x are added.

    Returns:
        Copies with the contraction axis contiguous: the col copy is stored as [C, R].
    """
    x, (rows, cols) = x.contiguous(), x.shape
    spec = plan.row or plan.col
    copies = Copies.allocate((rows, cols), plan.row, plan.col, x.device)
    if spec is not None and spec.block == (TILE, TILE):
        constants = tuple(sorted(defines(copies.row, copies.col).items()))
        tiles = rows // TILE * (cols // TILE)
        launch(
            "square.cu",
            constants,
            tiles,
            THREADS,
            0,
            (x, cols, arguments(copies.row), arguments(copies.col), nonfinite),
            x.device,
        )
    else:
        run(LOADED, x, (rows, cols), copies, None, nonfinite)
    return Quantized(copies.row, copies.col, nonfinite)


def run(
    source: int,
    x: Tensor,
    shape: tuple[int, int],
    copies: Copies,
    product: QTensor | None,
    nonfinite: Tensor,
    second: Tensor | None = None,
    weight: Tensor | None = None,
    plain: Tensor | None = None,
    plain_product: Tensor | None = None,
    kept: QTensor | None = None,
    kept_nonfinite: Tensor | None = None,
) -> None:
    """Fills copies of the bf16 values that `source` makes of x: in 1x128 blocks, `copies.col` also in 128x128 ones.

    Args:
        source: LOADED (x itself), NORMED (x * rstd * weight), SWIGLU (x is gate, then up) or SWIGLU_BACKWARD.
        x: contiguous bfloat16.
        shape: [R, C] of the values, or of the product for SWIGLU_BACKWARD, whose values are [R, 2C].
        copies: of the values.
        product: column copy of the product, for SWIGLU_BACKWARD.
        nonfinite: int64 scalar, to which the values' infinities and NaNs are added.
        second: rstd, float32 [R], for NORMED; the product's gradient, bfloat16 [R, C], for SWIGLU_BACKWARD.
        weight: float32 [C], rounded to bf16 before use, for NORMED.
        plain: bfloat16, receives the values.
        plain_product: bfloat16 [R, C], receives the product.
        kept: row copy of gate and up [R, 2C]: made by SWIGLU, read by SWIGLU_BACKWARD, which does not look at x then.
        kept_nonfinite: int64 scalar, to which infinities and NaNs are added when `kept` is made.
    """
    rows, cols = shape
    ahead, threads, blocks = TUNING[source]
    constants = defines(copies.row, copies.col, product or kept) | {
        "KEPT": int(kept is not None),
        "SOURCE": source,
        "SQUARE": int(copies.col is not None and copies.col.tile == (TILE, TILE)),
        "PLAIN": int(plain is not None),
        "PRODUCT": int(product is not None),
        "AHEAD": ahead,
        "THREADS": threads,
        "BLOCKS": blocks,
    }
    staged = constants["COL"] * (2 if source == SWIGLU_BACKWARD else 1) + constants["PRODUCT"]
    fields = (*map(arguments, (copies.row, copies.col, product, kept)), nonfinite, kept_nonfinite)
    launch(
        "tiles.cu", tuple(sorted(constants.items())), rows // TILE * (cols // TILE), threads, staged * STAGED_BYTES,
        (x, second, weight, plain, plain_product, cols, *fields), x.device,
    )  # fmt: skip


def norm_quantize(
    x: Tensor, rstd: Tensor, weight: Tensor, plan: QuantPlan, nonfinite: Tensor, plain: Tensor | None = None
) -> Quantized:
    """Copies of x * rstd * weight.

    Args:
        x: bfloat16 [T, D].
        rstd: float32 [T], from `elementwise.add_rstd`.
        weight: float32 [D], rounded to bf16 before use.
        plan: wanted copies.
        nonfinite: int64 scalar, added to.
        plain: bfloat16 [T, D] that receives the normed tensor.
    """
    shape = (x.shape[0], x.shape[1])
    copies = Copies.allocate(shape, plan.row, plan.col, x.device)
    run(NORMED, x, shape, copies, None, nonfinite, rstd, weight, plain)
    return Quantized(copies.row, copies.col, nonfinite)


def swiglu_quantize(
    gate_up: Tensor,
    plan: QuantPlan,
    nonfinite: Tensor,
    plain: Tensor | None = None,
    kept: QSpec | None = None,
    kept_nonfinite: Tensor | None = None,
) -> tuple[Quantized, QTensor | None]:
    """Copies of silu(gate) * up, and a row copy of gate and up for a backward that reads codes.

    Args:
        gate_up: bfloat16 [T, 2F], gate first.
        plan: wanted copies of the product.
        nonfinite: int64 scalar, to which those of the product are added.
        plain: bfloat16 [T, F] that receives the product.
        kept: spec of gate and up: 1x128, format and scale those of `plan`; None: not wanted.
        kept_nonfinite: int64 scalar, to which those of gate and up are added.
    """
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    copies = Copies.allocate(shape, plan.row, plan.col, gate_up.device)
    codes = Copies.allocate((gate_up.shape[0], gate_up.shape[1]), kept, None, gate_up.device).row
    run(SWIGLU, gate_up, shape, copies, None, nonfinite, plain=plain, kept=codes, kept_nonfinite=kept_nonfinite)
    return Quantized(copies.row, copies.col, nonfinite), codes


def swiglu_backward_quantize(
    grad: Tensor,
    gate_up: Operand,
    plan: QuantPlan,
    product: QSpec | None,
    nonfinite: Tensor,
    plain: Tensor | None = None,
    plain_product: Tensor | None = None,
) -> tuple[Quantized, QTensor | None]:
    """Copies of the gradient of gate_up and, rebuilt on the way, the product's column copy.

    Args:
        grad: bfloat16 [T, F], of silu(gate) * up.
        gate_up: bfloat16 [T, 2F], or its row copy in 1x128 blocks.
        plan: copies wanted of the gradient.
        product: the spec of the product's column copy: 1x128, format and scale those of `plan`; None: not wanted.
        nonfinite: int64 scalar, added to (by the gradient; the product was counted in the forward).
        plain: bfloat16 [T, 2F] that receives the gradient.
        plain_product: bfloat16 [T, F] that receives the product.
    """
    rows, width = grad.shape
    copies = Copies.allocate((rows, 2 * width), plan.row, plan.col, grad.device)
    rebuilt = Copies.allocate((rows, width), None, product, grad.device).col
    kept = gate_up if isinstance(gate_up, QTensor) else None
    source = gate_up.data if isinstance(gate_up, QTensor) else gate_up
    run(
        SWIGLU_BACKWARD, source, (rows, width), copies, rebuilt, nonfinite, grad, None, plain, plain_product, kept
    )  # fmt: skip
    return Quantized(copies.row, copies.col, nonfinite), rebuilt
