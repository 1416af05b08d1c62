"""AdamW with decoupled weight decay on float32 masters, clip by global norm, and the finiteness check, on the device.

The arithmetic is torch's fused AdamW: p <- p (1 - lr wd) - lr m^ / (sqrt(v^) + eps). Clipping goes in as its gradient
scale and a non-finite gradient as its `found_inf`, so that neither needs an answer on the host before the step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..config.schema import CptSettings


class AdamW:
    """Optimizer over named float32 parameters; vectors (norms and biases) are not decayed.

    Without `state` there are no moments, and a step changes nothing but clears the gradients.

    Attributes:
        parameters: name -> parameter, in a fixed order.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], settings: CptSettings, state: bool = True) -> None:
        self.parameters = dict(named)
        self.clip = settings.clip
        decayed = [p for p in self.parameters.values() if p.dim() > 1]
        plain = [p for p in self.parameters.values() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        betas = (settings.beta1, settings.beta2)
        self._adam = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)
        for parameter in self.parameters.values() if state else ():
            # Made now rather than at the first step, so that a checkpoint can be loaded into them.
            self._adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, lr: float, poisoned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One update with the gradients in `.grad` (float32, already averaged), which are then cleared.

        Args:
            lr: learning rate of this step.
            poisoned: bool scalar on the device: skip although the gradient is finite.

        Returns:
            Global gradient norm before clipping, and whether the step was skipped because it was not finite: scalars on
            the device (float32, 1 for skipped).
        """
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        bad = ~torch.isfinite(norm)
        skipped = (bad if poisoned is None else bad | poisoned).float()
        self._adam.found_inf = skipped  # type: ignore[attr-defined]
        # The fused kernel divides gradients by grad_scale.
        scale = (norm / self.clip).clamp(min=1.0) if self.clip else torch.ones_like(norm)
        self._adam.grad_scale = scale.nan_to_num(nan=1.0, posinf=1.0)  # type: ignore[attr-defined]
        for group in self._adam.param_groups:
            group["lr"] = lr
        if self._adam.state:
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return norm, skipped

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Parameter name -> (first, second) moment, float32, live tensors."""
        return {n: (self._state(p)["exp_avg"], self._state(p)["exp_avg_sq"]) for n, p in self.parameters.items()}

    @property
    def updates(self) -> int:
        """Updates made so far, skipped steps not counted (the bias correction's step count)."""
        return int(self._state(next(iter(self.parameters.values())))["step"].item())

    @updates.setter
    def updates(self, value: int) -> None:
        for parameter in self.parameters.values():
            self._state(parameter)["step"].fill_(value)

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return self._adam.state[parameter]
