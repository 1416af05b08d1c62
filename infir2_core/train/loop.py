"""The training loop.

    prepare: lock the run folder, build data and engine, resume from the newest intact checkpoint or start
    for each step: feed -> engine.train_step -> log -> maybe evaluate -> maybe save -> maybe stop

The same for continual pre-training and for fine-tuning: what differs between them is behind the feed (feed.py).

The order inside a step is what makes a resumed run equal to an uninterrupted one: a step is logged and evaluated before
it is saved, and everything logged after the checkpoint that a resume starts from is dropped. Whoever watches (a
terminal, a test) gets events through `Watcher`; nothing here prints.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..config.schema import RunConfig
from ..engines.native import MASTERS, Moment, NativeEngine, PendingStep, StepResult
from ..engines.ranks import Ranks
from ..errors import DivergedError, InputError, MachineError
from ..model.hf import load_hf
from ..optim.schedule import decay_done, learning_rate
from ..precision.recipe import Recipe
from .checkpoint import CheckpointStore
from .faults import INNOCENT, find_offender, plant_nan, save_batch
from .feed import Position, Share, corpus_order, open_feed
from .manifest import read_manifest
from .metrics import MetricsLog
from .stop import StopRequest

if TYPE_CHECKING:
    from .answers import Answers

UNTRAINED = 0.9  # share of ln(vocabulary) above which loaded weights count as untrained
PEAK_TFLOPS = {"H100": 989.5, "H200": 989.5}  # dense bf16, vendor datasheet; FP8 recipes are shown against it too


class Watcher(Protocol):
    """Receives what happens, in order."""

    def note(self, text: str) -> None:
        """Something a person should read once."""

    def gemms(self, rows: list[dict[str, Any]]) -> None:
        """Which GEMMs ran how, after the first microbatch."""

    def step(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl of kind `step`."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl of kind `eval`."""

    def sampled(self, record: dict[str, Any]) -> None:
        """A line of samples.jsonl: what the model answers to a fixed prompt."""


@dataclass
class Outcome:
    """How a run ended: `stopped` carries the reason of a requested stop."""

    step: int
    loss: float | None
    eval_loss: float | None
    stopped: str | None = None


@dataclass
class Queued:
    """A step that the device may still be working on."""

    step: int
    lr: float
    share: Share
    pending: PendingStep
    began: Moment


@dataclass
class Run:
    """One attempt of one run on one rank."""

    config: RunConfig
    recipe: Recipe
    folder: Path
    ranks: Ranks
    watcher: Watcher
    stop: StopRequest
    position: Position = field(default_factory=Position)
    _ended: Moment | None = field(default=None, init=False)  # the last step, if nothing but steps came after it

    def train(self) -> Outcome:
        """Trains to the last step or until asked to stop.

        Raises:
            InputError, MachineError, DivergedError: see the exit codes; checkpoints already written stay valid.
        """
        train = self.config.train
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
            torch.use_deterministic_algorithms(True)
        self.engine = NativeEngine(self.config, self.recipe, self.ranks)
        plant_nan(self.engine.model, lambda: self.position.step + 1)
        self.store = CheckpointStore(
            self.folder / "checkpoints",
            train.keep_last,
            train.keep_every,
            self.ranks.rank,
            self.ranks.world,
            self.ranks.save_barrier,
        )
        resumed = self._restore()
        self.feed = open_feed(self.config, self.ranks, self.position)
        self.position.train_samples = self.feed.train_samples
        done_before = self.position.step if resumed else None
        leader = self.ranks.rank == 0
        log = MetricsLog(self.folder, done_before) if leader else None
        if log is not None and log.note:
            self.watcher.note(log.note)
        self.answers = self._open_answers(done_before) if leader else None
        outcome = Outcome(self.position.step, None, None, self._stop_reason())
        try:
            if outcome.stopped is not None and not resumed:
                self._save()  # a stop during start-up: the run goes on from here
            elif outcome.stopped is None and self.position.step < train.steps:
                self._prove_precision()
                if self.position.step == 0:
                    outcome.eval_loss = self._evaluate(log)
                    self._check_loaded(outcome.eval_loss)
            before: Queued | None = None
            while self.position.step < train.steps and outcome.stopped is None:
                if before is not None and self.position.skips >= train.max_skips:
                    # The run may end with the step before, and must find its weights as that step left them.
                    outcome.loss, before = self._settle(before, log), None
                queued = self._step()
                if before is not None:
                    # The step before: by now the device has this one to work on while the host waits and writes.
                    outcome.loss = self._settle(before, log)
                done = outcome.step = self.position.step
                evaluates = train.eval_every and (done % train.eval_every == 0 or done == train.steps)
                if done < train.steps:
                    outcome.stopped = self._stop_reason()
                saves = done % train.save_every == 0 or done == train.steps or outcome.stopped
                before = queued
                if evaluates or saves or queued.pending.arrived.event is None:
                    outcome.loss, before = self._settle(queued, log), None
                    self._ended = None
                if evaluates:
                    outcome.eval_loss = self._evaluate(log)
                if saves:
                    self._save()
            self.store.wait()
            self.store.retire(decay_done(train, self.position.step))
        finally:
            if log is not None:
                log.close()
            if self.answers is not None:
                self.answers.close()
        return outcome

    def _stop_reason(self) -> str | None:
        """Why to stop now, the same on every rank; None to go on."""
        reason = self.stop.requested()
        return reason or "another rank was asked to stop" if self.ranks.any(reason is not None) else None

    def _restore(self) -> bool:
        """Loads the newest checkpoint of this run (True), or the weights the run starts from (False)."""
        self.store.clean()
        self.ranks.barrier()
        newest, damaged = self.store.newest()
        for reason in damaged:
            self.watcher.note(f"checkpoint passed over: {reason}")
        if newest is not None:
            loaded = self.store.load(newest)
            self.engine.load(loaded.tensors, loaded.state["engine"], optimizer=True, where=str(newest))
            self.position = Position(**loaded.state["position"])
            self.watcher.note(f"resuming {self.config.name} at step {self.position.step}")
            return True
        if damaged:
            raise InputError(
                "every checkpoint of this run is damaged", str(self.store.folder), "start again with --new"
            )
        self._start()
        return False

    def _start(self) -> None:
        source, train = self.config.source, self.config.train
        torch.manual_seed(train.seed)
        if source.kind == "scratch":
            self.engine.model.initialise(train.init_std, train.seed)
        elif source.kind == "hf":
            load_hf(self.engine.model, Path(source.path))
        else:
            path = Path(source.path)
            names = read_manifest(path)["tensors"]
            wanted = {n: None for n in names if source.optimizer or n.startswith(MASTERS)}
            loaded = CheckpointStore(path.parent).load(path, wanted)
            self.engine.load(loaded.tensors, loaded.state["engine"], source.optimizer, str(path))
            if source.optimizer:
                earlier = Position(**loaded.state["position"])
                self.position = Position(tokens=earlier.tokens)
                if self.config.cpt and loaded.state["data"] == corpus_order(self.config, self.config.cpt):
                    self.position.samples, self.position.train_samples = earlier.samples, earlier.train_samples
                else:
                    self.watcher.note("data, seed or sequence length are not those of the checkpoint: data starts anew")
        for _, layer in self.engine.model.linears():
            layer.drop_codes()

    def _prove_precision(self) -> None:
        """Shows what one microbatch really ran in; stops when FP8 was asked for and none ran."""
        batches = self.feed.step(self.position.samples).batches
        if not batches:
            return  # the last step has nothing for this rank
        rows = self.engine.gemm_report(batches[0])
        self.watcher.gemms(rows)
        if self.recipe.uses_fp8 and not any("e4m3" in row["operands"] or "e5m2" in row["operands"] for row in rows):
            raise MachineError(
                f"recipe {self.recipe.name} asks for FP8 and no GEMM of the model ran in FP8",
                "precision report after the first microbatch",
                "infir2 recipes show " + self.recipe.name + " tells which layers it covers",
            )

    def _step(self) -> Queued:
        # A step is charged the time since the one before it ended on the device, whenever the host looked at that one.
        position, began = self.position, self._ended or self.engine.moment()
        lr = learning_rate(self.config.train, position.step)
        share = self.feed.step(position.samples)
        pending = self.engine.train_step(share.batches, lr)
        self._ended = pending.arrived
        position.step += 1
        position.samples += share.samples
        return Queued(position.step, lr, share, pending, began)

    def _settle(self, queued: Queued, log: MetricsLog | None) -> float:
        """Waits for a step's numbers, counts and logs them; its loss."""
        position = self.position
        result = queued.pending.result()
        elapsed = queued.pending.arrived.seconds_since(queued.began)
        position.skips = position.skips + 1 if result.skipped else 0
        position.tokens += 0 if result.skipped else queued.share.tokens
        record = self._record(queued, result, elapsed)
        if log is not None:
            log.append(record)
        self.watcher.step(record)
        if position.skips > self.config.train.max_skips:
            self._give_up(queued)
        return result.loss

    def _record(self, queued: Queued, result: StepResult, elapsed: float) -> dict[str, Any]:
        share = queued.share
        rate = share.tokens / elapsed
        tflops = rate * self.config.model.flops_per_token(share.context) / 1e12
        record: dict[str, Any] = {
            "kind": "step",
            "step": queued.step,
            "loss": result.loss,
            "lr": queued.lr,
            "grad_norm": result.grad_norm,
            "tokens": self.position.tokens,
            "tok_per_s": round(rate, 1),
            "tflops": round(tflops, 4),
            "step_ms": round(elapsed * 1e3, 2),
            "skipped": result.skipped,
            "nonfinite_values": result.nonfinite_values,
            "time": time.time(),
        }
        if self.config.stage == "sft":
            record["padding_share"] = round(share.filler / (share.tokens + share.filler), 5)
            record["trained_share"] = round(result.trained / share.tokens, 5)
        if self.ranks.device.startswith("cuda"):
            record["memory_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
            name = torch.cuda.get_device_name()
            peak = next((p for card, p in PEAK_TFLOPS.items() if card in name), None)
            record["peak_share"] = round(tflops / (peak * self.ranks.world), 4) if peak else None
        else:
            import psutil

            record["memory_gb"] = round(psutil.Process().memory_info().rss / 2**30, 3)
        return record

    def _open_answers(self, done: int | None) -> Answers | None:
        sft = self.config.sft
        if sft is None or not sft.eval_every or not (sft.prompts or sft.answers):
            return None
        from .answers import Answers
        from .chat_feed import ChatFeed

        assert isinstance(self.feed, ChatFeed)
        return Answers(self.config, self.feed, self.engine.model, self.folder, done)

    def _evaluate(self, log: MetricsLog | None) -> float | None:
        batches, position, loss = self.feed.held_out(), self.position, None
        if batches is not None:
            loss = self.engine.evaluate(batches)
            record = {"kind": "eval", "step": position.step, "loss": loss, "tokens": position.tokens}
            record["time"] = time.time()
            if log is not None:
                log.append(record)
            self.watcher.evaluated(record)
        if self.answers is not None:
            for answer in self.answers.write(position.step):
                self.watcher.sampled(answer)
        return loss

    def _check_loaded(self, loss: float | None) -> None:
        source = self.config.source
        if source.kind == "scratch" or not source.check:
            return
        if loss is None:  # without validation, the first training batch tells as much
            loss = self.engine.evaluate(self.feed.step(self.position.samples).batches)
        limit = math.log(self.config.model.vocab)
        if not loss < UNTRAINED * limit:
            raise InputError(
                f"the loaded weights score {loss:.2f} nats a token, as untrained ones do: ln(vocabulary) = {limit:.2f}",
                source.path,
                "check that tokenizer and weights belong together, or pass --skip-load-check to train anyway",
            )

    def _save(self) -> None:
        # What is not kept any more goes before the next one is written, so that the disk never holds more than planned;
        # milestones stay until the last checkpoint is complete (train).
        self.store.wait()
        self.store.retire(decay_done=False)
        self.store.save(
            self.position.step,
            self.engine.tensors(),
            {"position": self.position.state(), "data": self.feed.order, "engine": self.engine.state()},
        )

    def _give_up(self, queued: Queued) -> None:
        self.store.wait()
        path = save_batch(self.folder, queued.step, self.ranks.rank, queued.share.batches)
        offender = self.ranks.first(find_offender(self.engine.model, queued.share.batches, self.ranks.device), INNOCENT)
        raise DivergedError(
            f"{self.position.skips} steps in a row were not finite; the trouble begins in {offender}",
            f"step {queued.step}; its batch is kept in {path}",
            f"start from an earlier checkpoint with a lower --lr (--max-skips is {self.config.train.max_skips})",
        )
