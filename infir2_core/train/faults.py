"""Non-finite values: where they come from, and a way for tests to plant them.

A single non-finite step is skipped. When a run gives up, the batch of the last bad step is saved and run again with
every layer watched, so that the error names a layer and not just a number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..data.batch import Batch
from ..model.decoder import Block, Decoder
from ..model.linear import Linear
from .fault_points import VARIABLE


class _Hooks(AbstractContextManager["_Hooks"]):
    """Forward hooks on the blocks and linears of a model, removed on exit."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.stack = model, ExitStack()

    def add(self, hook: Callable[[str, Any], None]) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, (Linear, Block)):
                handle = module.register_forward_hook(lambda _m, _i, out, name=name: hook(name, out))
                self.stack.callback(handle.remove)

    def __exit__(self, *error: object) -> None:
        self.stack.close()


def find_offender(model: Decoder, batches: Sequence[Batch], device: str) -> str:
    """Names the layer where the first non-finite value appears when `batches` run again.

    Weights are looked at before anything runs, then outputs in forward order, then gradients in backward order.

    Returns:
        A phrase such as "the output of layers.3.down" for the error message.
    """
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the weight {name}"
    found: list[str] = []

    def watch(name: str, out: Tensor) -> None:
        if not found and not bool(torch.isfinite(out).all()):
            found.append(f"the output of {name}")
        if out.requires_grad:
            out.register_hook(lambda grad: watch_grad(name, grad))

    def watch_grad(name: str, grad: Tensor) -> None:
        if not found and not bool(torch.isfinite(grad).all()):
            found.append(f"the gradient of the output of {name}")

    with _Hooks(model) as hooks:
        hooks.add(watch)
        for batch in batches:
            moved = batch.to(device)
            loss = -(moved.weights_T * model.logprobs(moved)).sum()
            if not found and not bool(torch.isfinite(loss)):
                found.append("the loss")
            loss.backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)
            if found:
                return found[0]
    return "no layer: the batch is finite when it runs again (a hardware error or a race)"


def save_batch(folder: Path, step: int, batches: Sequence[Batch]) -> Path:
    """Writes the microbatches of a step to FOLDER/faults/step-N.safetensors and returns the path."""
    path = folder / "faults" / f"step-{step:08d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for index, batch in enumerate(batches):
        tensors[f"{index}/tokens"] = batch.tokens_T.contiguous()
        tensors[f"{index}/targets"] = batch.targets_T.contiguous()
        tensors[f"{index}/lengths"] = torch.tensor(batch.lengths)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def plant_nan(model: nn.Module, step: Callable[[], int]) -> None:
    """Test instrumentation: INFIR2_FAULT=nan:LAYER[@step=N[-M]] makes the output of that layer NaN at those steps."""
    for entry in os.environ.get(VARIABLE, "").split(","):
        kind, _, rest = entry.strip().partition(":")
        if kind != "nan":
            continue
        layer, _, when = rest.partition("@step=")
        first, _, last = when.partition("-")
        low, high = (int(first), int(last or first)) if first else (0, 1 << 60)

        def poison(_m: nn.Module, _i: object, out: Tensor, low: int = low, high: int = high) -> Tensor:
            return out * float("nan") if low <= step() <= high and torch.is_grad_enabled() else out

        model.get_submodule(layer).register_forward_hook(poison)
