"""Non-finite values: where they come from, and a way for tests to plant them.

A single non-finite step is skipped. When a run gives up, the batch of the last bad step is saved and run again with
every layer watched, so that the error names a layer and not just a number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..data.batch import Batch
from ..model.decoder import Block, Decoder
from ..model.linear import Linear, Watch
from .fault_points import VARIABLE

INNOCENT = "no layer: the batch is finite when it runs again (a hardware error or a race)"


def find_offender(model: Decoder, batches: Sequence[Batch], device: str) -> str:
    """Names the layer where the first non-finite value appears when `batches` run again.

    Weights are looked at before anything runs, then outputs in forward order, gradients in backward order (a layer that
    turns finite gradients into others is named, not the one that receives them), weight gradients, and last what
    quantisers saw, because they turn an infinity into a number.

    Returns:
        A phrase such as "the output of layers.3.down" for the error message; `INNOCENT` when all is finite.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"the weight {name}"
    found: list[str] = []
    model.nonfinite_values.zero_()  # the optimizer counts what it quantises for the next step
    recompute, model.recompute = model.recompute, "none"  # hooks must not run twice
    with ExitStack() as stack:
        stack.callback(setattr, model, "recompute", recompute)
        for name, module in model.named_modules():
            if isinstance(module, Linear):
                module.watches.append(_watch_linear(name, found))
                stack.callback(module.watches.pop)
            elif isinstance(module, Block):
                for handle in _watch_block(name, module, found):
                    stack.callback(handle.remove)
        total = sum(float(batch.weights_T.sum()) for batch in batches)
        for batch in batches:
            _run_again(model, batch.to(device), total, found)
            if found:
                return found[0]
    return INNOCENT


def _run_again(model: Decoder, batch: Batch, total: float, found: list[str]) -> None:
    loss = -(batch.weights_T * model.logprobs(batch)).sum() / total
    if not found and not _finite(loss):
        found.append("the loss")
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if not found and parameter.grad is not None and not _finite(parameter.grad):
            found.append(f"the gradient of {name}")
    model.zero_grad(set_to_none=True)
    for name, layer in model.linears():
        if not found and int(layer.nonfinite_values):
            found.append(f"what {name} quantised")
    if not found and int(model.lm_head.nonfinite_values):
        found.append("what the head quantised")
    model.nonfinite_values.zero_()


def _watch_linear(name: str, found: list[str]) -> Watch:
    told = {
        "output": f"the output of {name}",
        "gradient": f"the gradient of the output of {name}",
        "input gradient": f"the backward pass of {name}",
    }

    def watch(kind: str, tensor: Tensor, _training: bool) -> None:
        if not found and not _finite(tensor):
            found.append(told[kind])

    return watch


def _watch_block(name: str, block: Block, found: list[str]) -> list[RemovableHandle]:
    def forward(_m: nn.Module, _i: object, out: tuple[Tensor, Tensor]) -> None:
        if not found and not all(map(_finite, out)):
            found.append(f"the output of {name}")

    def backward(_m: nn.Module, grad_in: tuple[Tensor | None, ...], grad_out: tuple[Tensor | None, ...]) -> None:
        if found or all(g is None or _finite(g) for g in grad_in):
            return
        innocent = all(g is None or _finite(g) for g in grad_out)
        found.append(f"the backward pass of {name}" if innocent else f"the gradient of the output of {name}")

    return [block.register_forward_hook(forward), block.register_full_backward_hook(backward)]  # type: ignore[arg-type]


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def save_batch(folder: Path, step: int, rank: int, batches: Sequence[Batch]) -> Path:
    """Writes a rank's microbatches of a step to FOLDER/faults/step-N.rank-R.safetensors and returns the path."""
    path = folder / "faults" / f"step-{step:08d}.rank-{rank}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for index, batch in enumerate(batches):
        tensors[f"{index}/tokens"] = batch.tokens_T.contiguous()
        tensors[f"{index}/targets"] = batch.targets_T.contiguous()
        tensors[f"{index}/lengths"] = torch.tensor(batch.lengths)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def plant_nan(model: nn.Module, step: Callable[[], int]) -> None:
    """Test instrumentation: INFIR2_FAULT=nan:LAYER[@step=N[-M]] makes the output of that layer NaN at those steps,
    nan-grad:LAYER the gradient that a linear passes on, inf:LAYER one element of its output infinite.
    """
    for entry in os.environ.get(VARIABLE, "").split(","):
        kind, _, rest = entry.strip().partition(":")
        if kind not in ("nan", "nan-grad", "inf"):
            continue
        layer, _, when = rest.partition("@step=")
        first, _, last = when.partition("-")
        span = range(int(first), int(last or first) + 1) if first else range(1 << 60)
        module = model.get_submodule(layer)
        if isinstance(module, Linear):
            module.watches.append(_poison_linear(kind, span, step))
        else:
            module.register_forward_hook(_poison_block(kind, span, step))


def _poison_linear(kind: str, span: range, step: Callable[[], int]) -> Watch:
    def watch(seen: str, tensor: Tensor, training: bool) -> Tensor | None:
        if not training or step() not in span or seen != ("input gradient" if kind == "nan-grad" else "output"):
            return None
        return _poisoned(tensor, kind)

    return watch


def _poison_block(kind: str, span: range, step: Callable[[], int]) -> Callable[..., tuple[Tensor, Tensor] | None]:
    def hook(_m: nn.Module, _i: object, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        if step() not in span or not torch.is_grad_enabled():
            return None
        return out[0], _poisoned(out[1], kind)

    return hook


def _poisoned(tensor: Tensor, kind: str) -> Tensor:
    """All of it NaN, or with `inf` one element infinite."""
    if kind != "inf":
        return tensor * float("nan")
    spike = torch.zeros_like(tensor)
    spike.view(-1)[0] = float("inf")
    return tensor + spike
