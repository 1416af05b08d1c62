"""Norm and SwiGLU with the quantisation of their results: chooses between the Hopper kernels and the reference.

Without a kernel that fits, the bf16 tensor is made first and quantised then; the numbers are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..precision.spec import QSpec, QuantPlan
from . import dispatch
from .reference import elementwise as reference
from .reference.matmul import Operand
from .reference.quantize import QTensor, State

BLOCK = 128  # sides of what the kernels take divide by this


@dataclass(frozen=True)
class Wanted:
    """What a tensor is wanted as.

    Attributes:
        plan: its quantised copies.
        plain: also the tensor itself, because some GEMM reads it unquantised.
        state: of its quantiser, for delayed scaling.
        counter: int64 scalar on the device, to which infinities and NaNs of what is quantised are added; None: not
            counted.
    """

    plan: QuantPlan
    plain: bool
    state: State | None
    counter: Tensor | None


PLAIN = Wanted(QuantPlan(), True, None, None)


@dataclass(frozen=True)
class Made:
    """Row and column copy of a tensor, and the tensor itself where it was wanted."""

    row: QTensor | None
    col: QTensor | None
    plain: Tensor | None

    def row_operand(self) -> Operand:
        """[R, C], contraction over C."""
        return self.row if self.row is not None else self.unquantised()

    def col_operand(self) -> Operand:
        """[C, R], contraction over R."""
        return self.col if self.col is not None else self.unquantised().T

    def unquantised(self) -> Tensor:
        """The tensor itself, [R, C]."""
        if self.plain is None:
            raise ValueError("this copy was not asked for")
        return self.plain


def make(source: Tensor, wanted: Wanted) -> Made:
    """The wanted forms of a tensor that exists."""
    if wanted.plan.row is None and wanted.plan.col is None:
        return Made(None, None, source)
    made = dispatch.quantize(source, wanted.plan, wanted.state, wanted.counter)
    return Made(made.row, made.col, source)


def add_rstd(x: Tensor, delta: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The residual sum and the norm's row statistic: `reference.add_rstd`."""
    if dispatch.fast(x) and x.dtype == torch.bfloat16:
        from .hopper import elementwise as hopper

        return hopper.add_rstd(x, delta, eps)
    return reference.add_rstd(x, delta, eps)


def norm(x: Tensor, rstd: Tensor, weight: Tensor, wanted: Wanted) -> Made:
    """x * rstd * weight as wanted, for x [T, D], rstd float32 [T], weight float32 [D]."""
    if _fits(x, x.shape[1], wanted.plan):
        from .hopper import quantize as hopper

        plain = torch.empty_like(x) if wanted.plain else None
        made = hopper.norm_quantize(x, rstd, weight, wanted.plan, _counter(x, wanted), plain)
        return Made(made.row, made.col, plain)
    return make(reference.norm(x, rstd, weight), wanted)


def norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient of x (the residual's included) and of the weight: `reference.norm_backward`."""
    if dispatch.fast(x):
        from .hopper import elementwise as hopper

        if hopper.supports_backward(x):
            return hopper.norm_backward(grad, x, rstd, weight, residual)
    return reference.norm_backward(grad, x, rstd, weight, residual)


def swiglu(gate_up: Tensor, wanted: Wanted, kept: Wanted = PLAIN) -> tuple[Made, Operand]:
    """silu(gate) * up [T, F] as wanted, for gate_up [T, 2F]; and gate_up as backward keeps it: row copy or itself."""
    half, spec = gate_up.shape[1] // 2, kept.plan.row
    if _fits(gate_up, half, wanted.plan, spec):
        from .hopper import quantize as hopper

        plain = gate_up.new_empty(gate_up.shape[0], half) if wanted.plain else None
        made, codes = hopper.swiglu_quantize(
            gate_up, wanted.plan, _counter(gate_up, wanted), plain, spec, _counter(gate_up, kept)
        )
        return Made(made.row, made.col, plain), gate_up if codes is None else codes
    return make(reference.swiglu_product(gate_up), wanted), make(gate_up, kept).row_operand()


def swiglu_backward(grad: Tensor, gate_up: Operand, wanted: Wanted, product: Wanted) -> tuple[Made, Made]:
    """The gradient of gate_up as wanted, and the product, rebuilt bit for bit, as its wgrad wants it.

    Args:
        grad: [T, F], of the product.
        gate_up: [T, 2F], or the codes that are left of it, which then are what is differentiated and multiplied.
        wanted: of the gradient.
        product: of the product.
    """
    if product.plan.row is not None:  # of which the kernel makes no row copy
        gradient, again = swiglu_backward(grad, gate_up, wanted, PLAIN)
        return gradient, make(again.unquantised(), product)
    codes = gate_up.spec if isinstance(gate_up, QTensor) else None
    if _fits(grad, grad.shape[1], wanted.plan, product.plan.col, codes):
        from .hopper import quantize as hopper

        plain = grad.new_empty(grad.shape[0], 2 * grad.shape[1]) if wanted.plain else None
        rebuilt = torch.empty_like(grad) if product.plain else None
        counter, spec = _counter(grad, wanted), product.plan.col
        made, col = hopper.swiglu_backward_quantize(grad, gate_up, wanted.plan, spec, counter, plain, rebuilt)
        return Made(made.row, made.col, plain), Made(None, col, rebuilt)
    values = dequantized(gate_up, grad.dtype)
    again = make(reference.swiglu_product(values), product)
    return make(reference.swiglu_backward(grad, values), wanted), again


def dequantized(operand: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of an operand: of codes in `dtype`, rounded once; of a tensor as they are."""
    if not isinstance(operand, QTensor):
        return operand
    return operand.dequantize(dtype) if operand.exact_in_bf16 else operand.dequantize().to(dtype)


def rope(heads_THd: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    """Bias and rotary embedding; in place where the kernel runs. Arguments as `reference.rope_heads`."""
    if _rotates(heads_THd):
        from .hopper.rope_heads import rotate_

        return rotate_(heads_THd, bias, cos, sin, rotated)
    return reference.rope_heads(heads_THd, bias, cos, sin, rotated)


def rope_backward(grad_THd: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> tuple[Tensor, Tensor]:
    """Gradients for the heads, in place where the kernel runs, and for the bias: `reference.rope_heads_backward`."""
    if _rotates(grad_THd):
        from .hopper.rope_heads import rotate_backward_

        return rotate_backward_(grad_THd, cos, sin, rotated)
    return reference.rope_heads_backward(grad_THd, cos, sin, rotated)


def _rotates(heads_THd: Tensor) -> bool:
    half = heads_THd.shape[-1] // 2
    return dispatch.fast(heads_THd) and heads_THd.dtype == torch.bfloat16 and half & (half - 1) == 0


def _counter(x: Tensor, wanted: Wanted) -> Tensor:
    return wanted.counter if wanted.counter is not None else torch.zeros((), dtype=torch.int64, device=x.device)


def _fits(x: Tensor, width: int, plan: QuantPlan, *beside: QSpec | None) -> bool:
    """Whether the kernels make these copies of a tensor with the rows of x and `width`.

    Of one format and scale rule, in 1x128 blocks, the plan's column copy also in 128x128 ones; `beside` are other
    copies of the same pass (None: not wanted).
    """
    if not dispatch.fast(x) or x.dtype != torch.bfloat16 or x.shape[0] % BLOCK or width % BLOCK:
        return False
    tiles = [spec for spec in (plan.row, *beside) if spec is not None]
    specs = tiles if plan.col is None else [*tiles, plan.col]
    alike = len({(spec.format, spec.scale) for spec in specs}) <= 1
    return alike and all(s.block_scaled for s in specs) and all(s.block == (1, BLOCK) for s in tiles)
