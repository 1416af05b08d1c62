"""The LM head's weight as its three GEMMs read it, by the policy that the recipe gives the role `head`.

Its parameter is the embedding's when the two are tied, so that it is no `Linear`; its GEMMs are those of ops/loss.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..ops.dispatch import transposed
from ..ops.fused import Wanted, make
from ..ops.reference.loss import Head
from ..ops.reference.quantize import QTensor
from ..precision.spec import QuantPlan
from .linear import Operands


class HeadWeight:
    """Quantises the head's weight once per optimizer step, where the policy asks for it.

    Args:
        operands: specs of the head's GEMMs; none of them needs a state.
        dtype: what an unquantised GEMM reads.
    """

    def __init__(self, operands: Operands, dtype: torch.dtype) -> None:
        self.operands, self.dtype = operands, dtype
        self.quantised = any(spec is not None for pair in operands.pairs().values() for spec in pair)
        self.nonfinite_values = torch.zeros((), dtype=torch.int64)
        self._cached: tuple[int, Head, bool] | None = None

    def read(self, weight: nn.Parameter, training: bool) -> Tensor | Head:
        """What `linear_cross_entropy` and `linear_logprob` take as their `head`.

        Args:
            weight: [V, D] master.
            training: a backward will follow, and infinities are counted.
        """
        if not self.quantised:
            return weight.detach().to(self.dtype)
        if self._cached is None or self._cached[0] != weight._version or (training and not self._cached[2]):
            self._cached = weight._version, self._made(weight.detach().to(self.dtype), training), training
        head, pairs = self._cached[1], self.operands.pairs()
        if not training:
            return replace(head, counter=None)
        if head.counter is not None:  # what was found in the weight, told to every step that uses these codes
            self.nonfinite_values += head.counter
        dgrad = head.dgrad
        if dgrad is None:  # turned anew for each microbatch: keeping it would take a byte a weight
            dgrad = transposed(head.fprop) if isinstance(head.fprop, QTensor) else head.fprop.T
        g = QuantPlan(row=pairs["g"][0], col=pairs["g"][1])
        return Head(head.fprop, dgrad, QuantPlan(row=head.x.row, col=pairs["x"][1]), g, self.nonfinite_values)

    def _made(self, source: Tensor, training: bool) -> Head:
        """The head of a forward, with the weight's other copy where it must be made from the weight itself; its counter
        has the weight's infinities and NaNs.
        """
        pairs, counter = self.operands.pairs(), torch.zeros_like(self.nonfinite_values)
        fprop, dgrad = pairs["w"]
        apart = training and (fprop != dgrad or (fprop is not None and not fprop.transposes))
        plan = QuantPlan(row=fprop, col=dgrad if apart else None)
        made = make(source, Wanted(plan, fprop is None or (apart and dgrad is None), None, counter))
        return Head(
            made.row_operand(), made.col_operand() if apart else None, QuantPlan(row=pairs["x"][0]), counter=counter
        )

    def drop_codes(self) -> None:
        """Forgets the weight's codes, because the master was changed."""
        self._cached = None
