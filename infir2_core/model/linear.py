"""A linear layer whose three GEMMs each use the operands that a policy asks for.

    fprop  y = Q(x) . Q(w)^T     dgrad  dx = Q(g) . Q(w)     wgrad  dw = Q(g)^T . Q(x)

The weight is kept as a float32 master; what is quantised is that master rounded to the compute dtype, the same bf16
numbers that are exported. Its codes are made once per optimizer step. For backward the layer keeps the wgrad copy of
its input, made in the forward from the same bf16 source: codes and scales, never the bf16 input itself, when the
policy quantises it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.dispatch import matmul, quantize
from ..ops.reference.matmul import Operand
from ..ops.reference.quantize import QTensor, State, advance_state, new_state
from ..precision.spec import QSpec, QuantPlan


@dataclass(frozen=True)
class Operands:
    """The spec of each operand of each GEMM; None means not quantised."""

    fprop_x: QSpec | None = None
    fprop_w: QSpec | None = None
    dgrad_g: QSpec | None = None
    dgrad_w: QSpec | None = None
    wgrad_g: QSpec | None = None
    wgrad_x: QSpec | None = None

    def pairs(self) -> dict[str, tuple[QSpec | None, QSpec | None]]:
        """Row and column spec of each tensor: x and w read in forward, g in backward."""
        return {
            "x": (self.fprop_x, self.wgrad_x),
            "w": (self.fprop_w, self.dgrad_w),
            "g": (self.dgrad_g, self.wgrad_g),
        }


class Linear(nn.Module):
    """y = x . w^T + b with w float32 [out, in] and b float32 [out] or None, computed in `dtype`."""

    def __init__(self, inputs: int, outputs: int, bias: bool, operands: Operands, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float32)) if bias else None
        self.operands, self.dtype = operands, dtype
        self.quant_state: dict[str, State] = {}
        self.nonfinite_values = torch.zeros((), dtype=torch.int64, device=self.weight.device)
        self._cached: tuple[int, Operand, Operand] | None = None
        for tensor, (row, col) in operands.pairs().items():
            stateful = next((s for s in (row, col) if s is not None and s.stateful), None)
            if stateful is not None:
                self.quant_state[tensor] = new_state(stateful, self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        training = torch.is_grad_enabled()  # asked here: inside a Function's forward it is always off
        return _LinearFunction.apply(x, self.weight, self.bias, self, training)  # type: ignore[no-any-return]

    def prepared_weight(self) -> tuple[Operand, Operand]:
        """The weight for fprop [out, in] and for dgrad [in, out], quantised again only when the master has changed."""
        version = self.weight._version
        if self._cached is None or self._cached[0] != version:
            with torch.no_grad():
                source = self.weight.detach().to(self.dtype)
                self._cached = (version, *self.both(source, "w"))
        return self._cached[1], self._cached[2]

    def both(self, source: Tensor, tensor: str, training: bool = True) -> tuple[Operand, Operand]:
        """Row and column operand of a [R, C] source: quantised where the policy says so, else (views of) the source."""
        row_spec, col_spec = self.operands.pairs()[tensor]
        state = self.quant_state.get(tensor)
        if not training:  # only fprop follows, and amax histories must not see evaluation data
            col_spec = None
            state = state and state | {"amax_now": state["amax_now"].clone()}
        if row_spec is None and col_spec is None:
            return source, source.T
        counter = self.nonfinite_values if training else None
        made = quantize(source, QuantPlan(row=row_spec, col=col_spec), state, counter)
        return made.row if made.row is not None else source, made.col if made.col is not None else source.T

    def drop_codes(self) -> None:
        """Forgets the weight's codes: the master was changed by something that does not bump its version counter."""
        self._cached = None

    def end_step(self) -> None:
        """Ends an optimizer step: the weight's codes are stale, delayed-scaling histories move on."""
        self.drop_codes()  # fused optimizers do not bump the version counter
        for tensor, state in self.quant_state.items():
            spec = next(s for s in self.operands.pairs()[tensor] if s is not None and s.stateful)
            advance_state(state, spec)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear, training: bool) -> Tensor:
        w_row, w_col = layer.prepared_weight()
        x_row, x_col = layer.both(x, "x", training)
        y = matmul("fprop", x_row, w_row, x.dtype, None if bias is None else bias.to(layer.dtype))
        if training:
            ctx.layer, ctx.has_bias = layer, bias is not None
            ctx.x_meta, x_saved = _pack(x_col)
            ctx.w_meta, w_saved = _pack(w_col)
            ctx.x_count = len(x_saved)
            ctx.save_for_backward(*x_saved, *w_saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None, None]:
        saved = ctx.saved_tensors
        x_col = _unpack(ctx.x_meta, saved[: ctx.x_count])
        w_col = _unpack(ctx.w_meta, saved[ctx.x_count :])
        grad = grads[0].contiguous()
        g_row, g_col = ctx.layer.both(grad, "g")
        grad_x = matmul("dgrad", g_row, w_col, grad.dtype) if ctx.needs_input_grad[0] else None
        grad_w = matmul("wgrad", g_col, x_col, torch.float32)
        grad_b = grad.float().sum(0) if ctx.has_bias else None
        return grad_x, grad_w, grad_b, None, None


def _pack(operand: Operand) -> tuple[QTensor | None, tuple[Tensor, ...]]:
    """Splits an operand into what autograd must hold (so that recomputation can drop it) and the rest."""
    if isinstance(operand, QTensor):
        empty = torch.empty(0)
        return QTensor(empty, empty, operand.tile, operand.axis, operand.spec), (operand.data, operand.scale)
    return None, (operand,)


def _unpack(meta: QTensor | None, saved: tuple[Tensor, ...]) -> Operand:
    if meta is None:
        return saved[0]
    return QTensor(saved[0], saved[1], meta.tile, meta.axis, meta.spec)
