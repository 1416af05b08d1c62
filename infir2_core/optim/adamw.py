"""AdamW with decoupled weight decay, clip by global norm, and the finiteness check, on the device.

Vectors, and matrices whose state is all float32, are updated by torch's fused AdamW:
p <- p (1 - lr wd) - lr m^ / (sqrt(v^) + eps).
Clipping goes in as its gradient scale and a non-finite gradient as its `found_inf`, so that neither needs an answer on
the host before the step. Matrices with state in fewer bits are updated by ops/reference/adam.py under the same rules,
and on Hopper all matrices by a kernel that also prepares the new weight for the GEMMs (ops/update.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config.schema import TrainSettings
from ..ops.reference.adam import Moment, Slot, Step
from ..ops.reference.moments import fits
from ..ops.update import Prepared, has_kernel, update_
from ..precision.recipe import Recipe
from ..precision.spec import QSpec


@dataclass(frozen=True)
class Forms:
    """How moments of matrices are stored: `fp32`, `bf16`, or the spec of E4M3 codes. Vectors are float32."""

    m: str | QSpec = "fp32"
    v: str | QSpec = "fp32"

    @staticmethod
    def of(recipe: Recipe) -> Forms:
        """What the recipe's `[optimizer]` says."""
        found = [recipe.specs.get(name, name) for name in (recipe.optimizer.m, recipe.optimizer.v)]
        return Forms(*found)

    def narrow(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter, its gradient or a moment of it is stored in fewer bits than float32."""
        if parameter.dim() != 2:
            return False
        coded = any(isinstance(form, QSpec) and fits(parameter.shape) for form in (self.m, self.v))
        return coded or "bf16" in (self.m, self.v) or torch.bfloat16 in (parameter.dtype, parameter.grad_dtype)


class AdamW:
    """Optimizer over named parameters; vectors (norms and biases) are not decayed.

    A bfloat16 parameter is the upper half of a split master (ops/reference/moments.py), whose remainder is kept here.
    Without `state` there are no moments, and a step changes nothing but clears the gradients.

    Attributes:
        parameters: name -> parameter, in a fixed order.
        slots: name -> parameter and state, of those that torch's AdamW does not update.
        refilled: names whose prepared weight the last step overwrote.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        settings: TrainSettings,
        state: bool = True,
        forms: Forms = Forms(),
    ) -> None:
        self.parameters = dict(named)
        self.settings, self.clip = settings, settings.clip
        self.slots: dict[str, Slot] = {}
        for name, parameter in self.parameters.items() if state else ():
            if forms.narrow(parameter) or has_kernel(parameter):
                self.slots[name] = _slot(name, parameter, forms)
        fused = [p for name, p in self.parameters.items() if name not in self.slots]
        decayed = [p for p in fused if p.dim() > 1]
        plain = [p for p in fused if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        betas = (settings.beta1, settings.beta2)
        self._adam = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)
        for parameter in fused if state else ():
            # Made now rather than at the first step, so that a checkpoint can be loaded into them.
            self._adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        device = next(iter(self.parameters.values())).device
        self._done = torch.zeros((), dtype=torch.int64, device=device)  # updates, skipped steps not counted
        self.refilled: set[str] = set()

    @torch.no_grad()
    def step(
        self, lr: float, poisoned: Tensor | None = None, prepared: Mapping[str, Prepared] | None = None
    ) -> tuple[Tensor, Tensor]:
        """One update with the gradients in `.grad` (already averaged), which are then cleared.

        Args:
            lr: learning rate of this step.
            poisoned: bool scalar on the device: skip although the gradient is finite.
            prepared: parameter name -> its old form for GEMMs, overwritten where a kernel can; `refilled` names those.

        Returns:
            Global gradient norm before clipping, and whether the step was skipped because it was not finite: scalars on
            the device (float32, 1 for skipped).
        """
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = _global_norm(grads)
        bad = ~torch.isfinite(norm)
        skipped = (bad if poisoned is None else bad | poisoned).float()
        self._adam.found_inf = skipped  # type: ignore[attr-defined]
        # The fused kernel divides gradients by grad_scale.
        scale = (norm / self.clip).clamp(min=1.0) if self.clip else torch.ones_like(norm)
        scale = scale.nan_to_num(nan=1.0, posinf=1.0)
        self._adam.grad_scale = scale  # type: ignore[attr-defined]
        for group in self._adam.param_groups:
            group["lr"] = lr
        if self._adam.state:
            self._adam.step()
        # Without state nothing changes, so that every prepared weight stays what it should be.
        self.refilled = set() if self._adam.state or self.slots else set(self.parameters)
        if self.slots:
            self._update(lr, scale, skipped.bool(), prepared or {})
        for parameter in self.parameters.values():
            parameter.grad = None
        return norm, skipped

    def _update(self, lr: float, scale: Tensor, skipped: Tensor, prepared: Mapping[str, Prepared]) -> None:
        """The slots' part of a step."""
        s = self.settings
        number = self._done + 1
        t = number.double()
        size, unbias = lr / (1 - s.beta1**t), 1 / (1 - s.beta2**t).sqrt()
        keep = 1 - lr * s.weight_decay
        step = Step(s.beta1, s.beta2, s.eps, keep, size.float(), unbias.float(), 1 / scale, skipped, number)
        scalars = torch.stack([step.size, step.unbias, step.factor, skipped.float()])
        for name, slot in self.slots.items():
            grad = self.parameters[name].grad
            if grad is not None and update_(slot, grad, step, scalars, prepared.get(name)):
                self.refilled.add(name)
        self._done += (~skipped).long()

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Parameter name -> (first, second) moment as float32 values; live tensors where they are stored so."""
        return {
            name: (slot.m.read(), slot.v.read())
            if (slot := self.slots.get(name)) is not None
            else (self._adam.state[p]["exp_avg"], self._adam.state[p]["exp_avg_sq"])
            for name, p in self.parameters.items()
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds beside the parameters: kind -> parameter name -> live tensor.

        Kinds: `remainder` (int16), `adam.m` and `adam.v` (values or codes), `adam.m.scale` and `adam.v.scale` (of
        codes). Every tensor has the rows of its parameter; a kind lacks the parameters that have no such tensor.
        """
        found: dict[str, dict[str, Tensor]] = {"remainder": {}, "adam.m": {}, "adam.m.scale": {}, "adam.v": {}}
        found["adam.v.scale"] = {}
        for name, parameter in self.parameters.items():
            slot = self.slots.get(name)
            if slot is None:
                state = self._adam.state[parameter]
                found["adam.m"][name], found["adam.v"][name] = state["exp_avg"], state["exp_avg_sq"]
                continue
            if slot.remainder is not None:
                found["remainder"][name] = slot.remainder
            for kind, moment in (("adam.m", slot.m), ("adam.v", slot.v)):
                found[kind][name] = moment.data
                if moment.scale is not None:
                    found[f"{kind}.scale"][name] = moment.scale
        return found

    @property
    def updates(self) -> int:
        """Updates made so far, skipped steps not counted (the bias correction's step count)."""
        if self.slots:
            return int(self._done.item())
        return int(next(iter(self._adam.state.values()))["step"].item())

    @updates.setter
    def updates(self, value: int) -> None:
        self._done.fill_(value)
        for state in self._adam.state.values():
            state["step"].fill_(value)


def _slot(name: str, parameter: nn.Parameter, forms: Forms) -> Slot:
    weight = parameter.detach()
    half = torch.zeros_like(weight, dtype=torch.int16) if weight.dtype == torch.bfloat16 else None
    m, v = (
        Moment.zeros(weight, form, zlib.crc32(f"{kind}/{name}".encode()))
        for kind, form in (("m", forms.m), ("v", forms.v))
    )
    return Slot(weight, half, m, v)


def _global_norm(grads: list[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, float32, whatever their dtypes."""
    if all(grad.dtype == torch.float32 for grad in grads):
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms))
