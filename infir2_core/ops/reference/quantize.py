"""One operand, or both copies of it, from bf16 (or float32) values to codes and scales.

A source tensor x of shape [R, C] enters GEMMs either along its rows (contraction over C: the *row* copy) or along its
columns (contraction over R: the *col* copy, which is the transpose quantised along its own rows). Both are made from
the source in one call, as a kernel would make them in one read. Codes keep the layout of the source; `QTensor.codes`
shows them with the contraction axis last. Blocks that stick out of the tensor are padded with zeros, which never
changes an amax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...precision.spec import QSpec, QuantPlan
from .codes import cast, decode, encode_scale

State = dict[str, Tensor]


@dataclass
class QTensor:
    """A quantised GEMM operand of logical shape [rows, contraction].

    Attributes:
        data: FP8 codes in the layout of the source [R, C].
        scale: float32 decode scales in the layout of the source, one per block.
        tile: block height and width in the layout of the source.
        axis: the source axis that is contracted (1: row copy, 0: col copy). A kernel may store a col copy transposed,
            contraction axis last, and then calls it 1 as well.
        spec: how it was quantised.
    """

    data: Tensor
    scale: Tensor
    tile: tuple[int, int]
    axis: int
    spec: QSpec

    @property
    def codes(self) -> Tensor:
        """Codes [rows, contraction] (a view)."""
        return self.data if self.axis == 1 else self.data.T

    @property
    def scale_inv(self) -> Tensor:
        """Decode scales [row blocks, contraction blocks] (a view)."""
        return self.scale if self.axis == 1 else self.scale.T

    @property
    def exact_in_bf16(self) -> bool:
        """Whether code times scale needs no more bits than bfloat16 has: true for power-of-two scales.

        (Values under bfloat16's smallest subnormal, 2**-133, are the exception.)
        """
        return self.spec.scale in ("pow2", "e8m0", "none")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Code times decode scale, [rows, contraction] (a view of a tensor in source layout)."""
        values = decode(self.data, dtype)
        rows, cols = values.shape
        (height, width), scale = self.tile, self.scale.to(dtype)
        if rows % height or cols % width:
            grid = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]
            values.mul_(grid)
        else:
            values.view(rows // height, height, cols // width, width).mul_(scale[:, None, :, None])
        return values if self.axis == 1 else values.T

    def transpose(self) -> QTensor:
        """The same codes with the other axis contracted.

        Raises:
            ValueError: the blocks are not square, so the transpose must be quantised from the source.
        """
        if not self.spec.transposes:
            raise ValueError(f"{self.spec.label()} cannot be transposed exactly")
        return QTensor(self.data, self.scale, self.tile, 1 - self.axis, self.spec)


@dataclass
class Quantized:
    """Both copies of one source; None where the plan did not ask.

    `nonfinite` counts infinities and NaNs: int64 scalar on the source's device. The dispatcher's is the running counter
    that it was given.
    """

    row: QTensor | None
    col: QTensor | None
    nonfinite: Tensor


def quantize(x: Tensor, plan: QuantPlan, state: State | None = None) -> Quantized:
    """Quantises a [R, C] tensor as `plan` says.

    Args:
        x: bfloat16 or float32, any device.
        plan: the wanted copies.
        state: for delayed scaling, the tensors made by `new_state`; the amax of x is recorded in it.

    Raises:
        ValueError: the spec needs a piece that does not exist, or a state that was not given.
    """
    magnitude, nonfinite = x.abs(), torch.zeros((), dtype=torch.int64, device=x.device)
    if x.device.type != "cpu" or not bool(torch.isfinite(magnitude.max())):  # a GPU must not wait for the answer
        nonfinite = x.numel() - torch.isfinite(x).sum()
        magnitude = magnitude.nan_to_num(nan=0.0, posinf=torch.inf)  # NaN takes no part in amax
    row = _copy(x, magnitude, plan.row, 1, state) if plan.row is not None else None
    if plan.col is None:
        return Quantized(row, None, nonfinite)
    if row is not None and plan.col == plan.row and plan.col.transposes:
        return Quantized(row, row.transpose(), nonfinite)
    return Quantized(row, _copy(x, magnitude, plan.col, 0, state), nonfinite)


def shifted(q: QTensor, spec: QSpec) -> QTensor:
    """The column copy of a tensor from the codes of its row copy, without the tensor.

    All codes of a block of rows (the block of `spec` along the contraction) and of a block of columns (that of `q`) get
    one scale, the coarsest among the rows that are not all zero (1 if all are), as if the block had been quantised with
    one scale. A code is divided by the power of two between the two scales: exactly, but for codes that become
    subnormal, which are rounded to nearest even.

    Args:
        q: row copy [R, C] with `spec.shifts_from(q.spec)`.
        spec: of the column copy.

    Returns:
        The column copy: codes [R, C] in the layout of the source, contraction over R.

    Raises:
        ValueError: `q` is no such row copy.
    """
    if q.axis != 1 or not spec.shifts_from(q.spec):
        raise ValueError(f"{spec.label()} cannot be made from {q.spec.label()}")
    (rows, cols), width = q.data.shape, q.tile[1]
    height, narrow = tile_shape(spec, (rows, cols), 0)
    taken = block_amax(q.data.view(torch.uint8) & 0x7F, (1, width)) > 0
    coarsest = block_amax(torch.where(taken, q.scale, 0.0), (height, 1))
    coarsest = torch.where(coarsest > 0, coarsest, 1.0)
    # Rows of zeros may have a larger scale, 1.
    factor = (q.scale / coarsest.repeat_interleave(height, 0)[:rows]).clamp(max=1.0)
    values = decode(q.data, torch.float32) * factor.repeat_interleave(width, 1)[:, :cols]
    scale = coarsest if narrow == width else coarsest.repeat_interleave(width, 1)[:, :cols].contiguous()
    return QTensor(cast(values, spec.format), scale, (height, narrow), 0, spec)


def tile_shape(spec: QSpec, shape: tuple[int, int], axis: int) -> tuple[int, int]:
    """Block height and width in the layout of a [R, C] source whose `axis` is contracted."""
    rows, cols = shape
    if spec.block == "tensor":
        return rows, cols
    if spec.block == "row":
        return (1, cols) if axis == 1 else (rows, 1)
    across, along = spec.block
    return (across, along) if axis == 1 else (along, across)


def block_amax(magnitude: Tensor, tile: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block, float32 [ceil(R / height), ceil(C / width)], for magnitudes without NaN."""
    (rows, cols), (height, width) = magnitude.shape, tile
    if rows % height or cols % width:
        magnitude = F.pad(magnitude, (0, -cols % width, 0, -rows % height))
        rows, cols = magnitude.shape
    blocks = magnitude.view(rows // height, height, cols // width, width)
    # One axis at a time: reductions over the last axis or over whole rows vectorise, mixed ones do not.
    blocks = blocks.amax(3) if width > 1 else blocks.squeeze(3)
    return (blocks.amax(1) if height > 1 else blocks.squeeze(1)).float()


def _copy(x: Tensor, magnitude: Tensor, spec: QSpec, axis: int, state: State | None) -> QTensor:
    rows, cols = x.shape
    height, width = tile = tile_shape(spec, (rows, cols), axis)
    amax = block_amax(magnitude, tile)
    if spec.amax == "static":
        amax = torch.full_like(amax, spec.static_amax or 1.0)
    elif spec.amax == "delayed":
        if state is None:
            raise ValueError("delayed scaling needs the state of its operand")
        state["amax_now"].copy_(torch.maximum(state["amax_now"], amax))
        amax = state["amax_used"]
    elif spec.amax != "current":
        raise ValueError(f"amax {spec.amax} has no implementation")
    encode, inverse = encode_scale(amax, spec)
    source = x
    if rows % height or cols % width:
        source = F.pad(x, (0, -cols % width, 0, -rows % height))
    padded_rows, padded_cols = source.shape
    blocks = source.view(padded_rows // height, height, padded_cols // width, width)
    scaled = (blocks * encode[:, None, :, None]).view(padded_rows, padded_cols)  # float32, as the scale is
    return QTensor(cast(scaled[:rows, :cols].contiguous(), spec.format), inverse, tile, axis, spec)


def new_state(spec: QSpec, device: torch.device | str = "cpu") -> State:
    """State of one operand under delayed scaling.

    `amax_history` [history]: amax of the last steps, newest in slot 0 (TransformerEngine's order differs only in where
    the newest stands; the maximum is the same). `amax_now` [1, 1]: largest amax seen in the step that is running.
    `amax_used` [1, 1]: what scales are computed from; 0 gives scale 1, as in the step before any history exists.
    """
    return {
        "amax_history": torch.zeros(spec.history, dtype=torch.float32, device=device),
        "amax_now": torch.zeros(1, 1, dtype=torch.float32, device=device),
        "amax_used": torch.zeros(1, 1, dtype=torch.float32, device=device),
    }


def advance_state(state: State, spec: QSpec) -> None:
    """Ends an optimizer step: the step's amax enters the history, whose maximum rules the next step.

    An infinite amax is not taken into the history: one overflowing step would otherwise set the scale for `history`
    steps.
    """
    now = state["amax_now"].flatten()
    history = state["amax_history"]
    history.copy_(torch.cat([torch.where(now.isinf(), history[:1], now), history[:-1]]))
    largest = history.max()
    # An operand that was zero all along keeps its scale, as in TransformerEngine.
    state["amax_used"].copy_(torch.where(largest > 0, largest * 2.0**spec.margin, state["amax_used"]))
    state["amax_now"].zero_()
