"""The engine for a CPU, one GPU, or data-parallel ranks of one box: replicated weights, summed gradients.

One optimizer step is: every microbatch forward and backward (gradients add up in float32, or in bf16 with stochastic
rounding), one sum over ranks in float32, AdamW.
The loss is a mean over the tokens of the whole global batch, whatever the microbatches hold. Checkpoints name tensors
as Hugging Face does, so that they load into any layout of the same model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config.schema import RunConfig
from ..data.batch import Batch
from ..errors import InputError
from ..model.decoder import Decoder
from ..model.gradients import begin_step, sum_over_ranks
from ..ops.dispatch import ledger
from ..ops.loss import one
from ..optim.adamw import AdamW, Forms
from ..optim.fit import describe, fit
from ..precision.recipe import Recipe
from .ranks import Ranks

MASTERS = ("model/", "remainder/")  # how names of tensors begin that weights are loaded from


@dataclass
class StepResult:
    """What one optimizer step yields, on the host.

    Attributes:
        loss: mean negative log-probability of the global batch's trained tokens, in nats.
        grad_norm: global, before clipping.
        skipped: the gradient was not finite and nothing was updated.
        nonfinite_values: infinities and NaNs that were quantised.
        trained: sum of the loss weights, that is the number of tokens trained on.
    """

    loss: float
    grad_norm: float
    skipped: bool
    nonfinite_values: int
    trained: float


class Moment:
    """A point in a device's work: the present end of a GPU's queue, or now on a CPU, where nothing is queued."""

    def __init__(self, cuda: bool) -> None:
        self.wall, self.event = time.perf_counter(), torch.cuda.Event(enable_timing=True) if cuda else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Until the device is there."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Of the device, however late the host looks; both moments must have passed."""
        if self.event is None or earlier.event is None:
            return self.wall - earlier.wall
        return earlier.event.elapsed_time(self.event) / 1e3


@dataclass
class PendingStep:
    """A step that has been queued; its numbers are on their way to the host."""

    values: Tensor
    arrived: Moment

    def result(self) -> StepResult:
        """Waits for the numbers. Asking one step late keeps the device busy in between."""
        self.arrived.wait()
        loss, norm, skipped, nonfinite, trained = self.values.tolist()
        return StepResult(loss, norm, bool(skipped), int(nonfinite), trained)


class NativeEngine:
    """Model, optimizer and quantiser state of one rank.

    Without `optimizer` there is no state of it, and a step ends with its gradients, which are thrown away: for timing
    models whose state does not fit.
    """

    def __init__(self, config: RunConfig, recipe: Recipe, ranks: Ranks, optimizer: bool = True) -> None:
        self.config, self.recipe, self.ranks = config, recipe, ranks
        self.model = Decoder(config.model, recipe, ranks.device, config.train.recompute)
        self.forms = Forms.of(recipe)
        self.optimizer = AdamW(self.model.named_parameters(), config.train, optimizer, self.forms)
        self.begun = 0  # steps, skipped ones too: no two of them may round gradients with the same random bits
        # GEMMs that split their contraction would otherwise add partial sums in bf16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def train_step(
        self, batches: Sequence[Batch], lr: float, mark: Callable[[str], None] = lambda phase: None
    ) -> PendingStep:
        """Queues one optimizer step over this rank's microbatches at learning rate `lr`; nothing waits for the device.

        Ranks may have different numbers of microbatches, also none. `mark` is called when a microbatch's `forward`, its
        `backward` and the `optimizer` have been queued.
        """
        moved = [batch.to(self.ranks.device) for batch in batches]
        total = torch.zeros((), device=self.ranks.device)
        for batch in moved:
            total += batch.weights_T.sum()
        self.ranks.sum([total])
        loss = torch.zeros((), device=self.ranks.device)
        self.begun += 1
        begin_step(self.model.parameters(), self.begun, self.ranks.rank)
        for batch in moved:
            part, _ = self.model.loss(batch, batch.weights_T / total)
            mark("forward")
            part.backward(one(part.device))  # type: ignore[no-untyped-call]
            mark("backward")
            loss += part.detach()
        self.ranks.sum([loss])
        if self.ranks.world > 1:
            if not moved:
                for parameter in self.model.parameters():
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            sum_over_ranks(self.model.parameters(), self.ranks.sum)
        self.ranks.largest(
            state["amax_now"] for _, layer in self.model.linears() for state in layer.quant_state.values()
        )
        nonfinite = self.model.nonfinite_values.sum()
        self.ranks.sum([nonfinite])
        self.model.nonfinite_values.zero_()  # before the optimizer counts what it quantises for the next step
        # A quantiser turns an infinity into its largest value, so the gradient alone would not show it.
        norm, skipped = self.optimizer.step(lr, nonfinite > 0, self.model.refillable())
        self.model.end_step(self.optimizer.refilled)
        mark("optimizer")
        return self._on_its_way(loss, norm, skipped, nonfinite, total)

    def _on_its_way(self, *values: Tensor) -> PendingStep:
        stacked = torch.stack([value.double() for value in values])
        if not stacked.is_cuda:
            return PendingStep(stacked, self.moment())
        host = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        return PendingStep(host, self.moment())

    def moment(self) -> Moment:
        """The end of what this rank's device has been given to do so far."""
        return Moment(self.ranks.device.startswith("cuda"))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean negative log-probability over the batches of all ranks, in nats."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        for batch in batches:
            moved = batch.to(self.ranks.device)
            sums[0] -= (moved.weights_T * self.model.logprobs(moved)).sum().double()
            sums[1] += moved.weights_T.sum().double()
        self.ranks.sum([sums])
        return float(sums[0] / sums[1])

    def gemm_report(self, batch: Batch) -> list[dict[str, Any]]:
        """Runs one microbatch forward and backward and reports which GEMMs ran in which precision, by which code.

        Gradients and quantiser state are left as they were.
        """
        kept = {name: tensor.clone() for name, tensor in self.model.quantiser_tensors().items()}
        ledger.start()
        moved = batch.to(self.ranks.device)
        self.model.loss(moved, moved.weights_T)[0].backward()  # type: ignore[no-untyped-call]
        counts = ledger.stop()
        self.model.zero_grad(set_to_none=True)
        for name, tensor in self.model.quantiser_tensors().items():
            tensor.copy_(kept[name])
        self.model.nonfinite_values.zero_()
        for _, layer in self.model.linears():
            layer.drop_codes()  # the first step must quantise the weight itself, and record its amax
        return [{"gemm": g, "operands": o, "by": by, "count": n} for (g, o, by), n in counts.items()]

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold, as live tensors (the store copies them)."""
        named: dict[str, Tensor] = {}
        views = {"model": {n: p.detach() for n, p in self.optimizer.parameters.items()}} | self.optimizer.tensors()
        for kind, tensors in views.items():
            for name, rows in self.model.hf_layout().items():
                if rows.parameter in tensors:
                    named[f"{kind}/{name}"] = tensors[rows.parameter][rows.start : rows.stop]
        named |= self.model.quantiser_tensors()
        named["rng/cpu"] = torch.get_rng_state()
        if self.ranks.device.startswith("cuda"):
            named["rng/cuda"] = torch.cuda.get_rng_state(self.ranks.device)
        return named

    def state(self) -> dict[str, Any]:
        """Scalars that belong to `tensors`."""
        return {
            "updates": self.optimizer.updates,
            "begun": self.begun,
            "recipe": self.recipe.hash,
            "moments": describe(self.forms),
            "model": self.config.model.model_dump(),
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], optimizer: bool, where: str) -> None:
        """Fills the engine from a checkpoint, whatever the forms of the optimizer state it was written with.

        Args:
            tensors: as `tensors()` names them, on the CPU.
            state: as `state()` returned it.
            optimizer: also moments, quantiser state and RNG; weights alone otherwise.
            where: shown in errors.

        Raises:
            InputError: a tensor is missing or has another shape.
        """
        wanted, updates = self.tensors(), int(state["updates"])
        tensors = fit(tensors, wanted, state.get("moments", {}), self.forms, updates)
        for name, target in wanted.items():
            if name.startswith("rng/") or (not optimizer and not name.startswith(MASTERS)):
                continue
            if name.startswith("quant/") and state.get("recipe") != self.recipe.hash:
                continue  # another recipe's histories mean nothing here; they fill again within a step
            if name not in tensors:
                raise InputError(f"the checkpoint has no tensor '{name}'", where)
            if tensors[name].shape != target.shape:
                raise InputError(
                    f"'{name}' is {list(tensors[name].shape)}, this model needs {list(target.shape)}", where
                )
            target.copy_(tensors[name])
        if optimizer:
            self.optimizer.updates = updates
            self.begun = int(state.get("begun", updates))
            torch.set_rng_state(tensors["rng/cpu"])
            if self.ranks.device.startswith("cuda") and "rng/cuda" in tensors:
                torch.cuda.set_rng_state(tensors["rng/cuda"], self.ranks.device)
        for _, layer in self.model.linears():
            layer.drop_codes()
