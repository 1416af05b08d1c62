"""A linear layer whose three GEMMs each use the operands that a policy asks for.

    fprop  y = Q(x) . Q(w)^T     dgrad  dx = Q(g) . Q(w)     wgrad  dw = Q(g)^T . Q(x)

The weight is kept as a float32 master; what is quantised is that master rounded to the compute dtype, the same bf16
numbers that are exported. (With a split master the weight is those bf16 numbers, the optimizer has the rest.) Its codes
are made once per optimizer step. For backward the layer keeps the wgrad copy of its input, made in the forward from the
same bf16 source: codes and scales, never the bf16 input itself, when the policy quantises it. A policy may have that
copy made of the row copy's codes (`codes_shift`): then it is the row copy that is kept, and turned in the backward.
(The down projection of a feed-forward half keeps nothing: functions.py rebuilds its input.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..ops.dispatch import matmul, shifted, transposed
from ..ops.fused import PLAIN, Made, Wanted, dequantized, make
from ..ops.reference.matmul import Operand
from ..ops.reference.quantize import QTensor, State, advance_state, new_state
from ..ops.update import Prepared
from ..precision.spec import QSpec, QuantPlan
from .gradients import accumulate, float_sum


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


# Sees ("output", y, training), ("gradient", dL/dy, True) or ("input gradient", dL/dx, True) and may replace it. The
# functions of this model call layers' GEMMs and not the layers, so module hooks would not see them.
Watch = Callable[[str, Tensor, bool], Tensor | None]


class Linear(nn.Module):
    """y = x . w^T with w [out, in] in `kept`, computed in `dtype`.

    A bias, float32 [out], is only kept here: the function that reads y adds it, and its gradient (`rope_qkv`).
    `saved_output` is how a function that needs y in its backward keeps it: None for as it is. With `rebuilt_input`, a
    function that makes x makes it again in its backward instead of keeping codes of it.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        operands: Operands,
        dtype: torch.dtype,
        kept: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=kept))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float32)) if bias else None
        self.operands, self.dtype = operands, dtype
        self.saved_output: QSpec | None = None
        self.rebuilt_input = False
        self.quant_state: dict[str, State] = {}
        self.nonfinite_values = torch.zeros((), dtype=torch.int64, device=self.weight.device)
        self._cached: tuple[int, Operand, Operand | None] | None = None
        self.watches: list[Watch] = []
        for tensor, (row, col) in operands.pairs().items():
            stateful = next((s for s in (row, col) if s is not None and s.stateful), None)
            if stateful is not None:
                self.quant_state[tensor] = new_state(stateful, self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        training = torch.is_grad_enabled()  # asked here: inside a Function's forward it is always off
        return _LinearFunction.apply(x, self.weight, self, training)  # type: ignore[no-any-return]

    def fprop_weight(self) -> Operand:
        """The weight [out, in] for fprop, quantised again only when the master has changed."""
        return self._prepared()[1]

    def dgrad_weight(self) -> Operand:
        """The weight [in, out] for dgrad: turned from fprop's codes where both are of the same square blocks."""
        _, row, col = self._prepared()
        if col is not None:
            return col
        return transposed(row) if isinstance(row, QTensor) else row.T

    def _prepared(self) -> tuple[int, Operand, Operand | None]:
        version = self.weight._version
        if self._cached is None or self._cached[0] != version:
            fprop, dgrad = self.operands.pairs()["w"]
            same = fprop == dgrad and (fprop is None or fprop.transposes)
            with torch.no_grad():
                source = self.weight.detach().to(self.dtype)
                made = make(source, self.wanted("w", col=not same))
                self._cached = (version, made.row_operand(), None if same else made.col_operand())
        return self._cached

    def refillable(self) -> Prepared | None:
        """The prepared weight that an optimizer may overwrite with that of its new one; None: there is none.

        Only one that serves fprop and dgrad both, of the current master.
        """
        if self._cached is None or self._cached[0] != self.weight._version or self._cached[2] is not None:
            return None
        return Prepared(self._cached[1], self.nonfinite_values)

    def wanted(
        self, tensor: str, row: bool = True, col: bool = True, training: bool = True, counted: bool = True
    ) -> Wanted:
        """What the GEMMs of this layer want of `x`, `w` or `g`: the row copy, the column copy or both.

        Only fprop follows when not `training`: then no column copy is made, and neither amax histories nor the count of
        infinities see the data. A tensor that is quantised a second time is not `counted` again. In place of a column
        copy that is made of the row copy's codes, the row copy is wanted.
        """
        col = col and training
        if tensor == "x" and self.shifts:
            row, col = row or col, False
        row_spec, col_spec = self.operands.pairs()[tensor]
        plan = QuantPlan(row=row_spec if row else None, col=col_spec if col else None)
        plain = (row and row_spec is None) or (col and col_spec is None)
        state = self.quant_state.get(tensor)
        if not training:
            state = state and state | {"amax_now": state["amax_now"].clone()}
        return Wanted(plan, plain, state, self.nonfinite_values if training and counted else None)

    def fprop(self, x: Operand, training: bool) -> Tensor:
        """x . w^T for the row operand of x."""
        return self._watched("output", matmul("fprop", x, self.fprop_weight(), self.dtype), training)

    def dgrad(self, g: Made) -> Tensor:
        """Gradient of x."""
        if self.watches:
            self._watched("gradient", g.plain if g.plain is not None else dequantized(g.row_operand()))
        return self._watched("input gradient", matmul("dgrad", g.row_operand(), self.dgrad_weight(), self.dtype))

    @property
    def shifts(self) -> bool:
        """Whether wgrad's copy of x is made of the codes of fprop's."""
        return self.operands.wgrad_x is not None and self.operands.wgrad_x.shifts_from(self.operands.fprop_x)

    def kept_input(self, x: Made) -> Operand:
        """What backward needs of x: wgrad's operand, or the row copy of which it is made."""
        return x.row_operand() if self.shifts else x.col_operand()

    def wgrad_input(self, kept: Operand) -> Operand:
        """Wgrad's operand of x, [in, T], from what `kept_input` gave."""
        if self.shifts and isinstance(kept, QTensor) and self.operands.wgrad_x is not None:
            return shifted(kept, self.operands.wgrad_x)
        return kept

    def wgrad(self, g: Made, x: Operand) -> None:
        """Adds the weight's gradient, float32 [out, in], unless it is frozen.

        Args:
            g: the gradient of y.
            x: column operand of x.
        """
        if self.weight.requires_grad:
            total = float_sum(self.weight)
            made = matmul("wgrad", g.col_operand(), x, torch.float32, total=total)
            if total is None:
                accumulate(self.weight, made)

    def _watched(self, kind: str, tensor: Tensor, training: bool = True) -> Tensor:
        for watch in self.watches:
            replaced = watch(kind, tensor, training)
            tensor = tensor if replaced is None else replaced
        return tensor

    def kept_output(self) -> Wanted:
        """How y is kept by a backward that needs it: `saved_output` codes, or as it is."""
        if self.saved_output is None:
            return PLAIN
        return Wanted(QuantPlan(row=self.saved_output), False, None, self.nonfinite_values)

    def drop_codes(self) -> None:
        """Forgets the weight's codes: the master was changed by something that does not bump its version counter."""
        self._cached = None

    def end_step(self, refilled: bool = False) -> None:
        """Ends an optimizer step: the weight's codes are stale unless `refilled`, delayed-scaling histories move on."""
        if not refilled:
            self.drop_codes()  # fused optimizers do not bump the version counter
        for tensor, state in self.quant_state.items():
            spec = next(s for s in self.operands.pairs()[tensor] if s is not None and s.stateful)
            advance_state(state, spec)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Linear, training: bool) -> Tensor:
        made = make(x, layer.wanted("x", training=training))
        if training:
            ctx.layer = layer
            ctx.meta, saved = pack(layer.kept_input(made))
            ctx.save_for_backward(*saved)
        return layer.fprop(made.row_operand(), training)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        layer: Linear = ctx.layer
        kept, grad = unpack(ctx.meta, ctx.saved_tensors), grads[0].contiguous()
        g = make(grad, layer.wanted("g"))
        grad_x = layer.dgrad(g) if ctx.needs_input_grad[0] else None
        layer.wgrad(g, layer.wgrad_input(kept))
        return grad_x, None, None, None


def pack(operand: Operand) -> tuple[QTensor | None, tuple[Tensor, ...]]:
    """Splits an operand into what autograd must hold (so that recomputation can drop it) and the rest."""
    if isinstance(operand, QTensor):
        empty = torch.empty(0)
        return QTensor(empty, empty, operand.tile, operand.axis, operand.spec), (operand.data, operand.scale)
    return None, (operand,)


def unpack(meta: QTensor | None, saved: tuple[Tensor, ...]) -> Operand:
    """The operand that `pack` took apart."""
    if meta is None:
        return saved[0]
    return QTensor(saved[0], saved[1], meta.tile, meta.axis, meta.spec)
