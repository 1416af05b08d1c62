"""What a run will take before it starts: tokens, memory a device, disk. Formulas, each with its source, no
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.schema import ALIGNMENT, RunConfig
from ..precision.recipe import Recipe, load_recipe
from ..precision.spec import parse_format
from ..precision.support import block_scaled

HEAD_CHUNK = 5 << 29  # CHUNK_BYTES of ops/loss.py (a test compares them), which would bring torch with it

GIB = 2**30
MARGIN = 1.05  # plan over measurement, at most (tests/unit/test_config_presets.py)


@dataclass(frozen=True)
class Plan:
    """Figures of a resolved run. Bytes are per device unless said."""

    parameters: int
    tokens: int
    tokens_per_step: int
    flops: float
    state_bytes: int
    activation_bytes: int
    shared_bytes: int
    checkpoint_bytes: int
    peak_disk_bytes: int

    @property
    def memory_bytes(self) -> int:
        """State and activations of one device, less `shared_bytes`: activations first, gradients later."""
        return self.state_bytes + self.activation_bytes - self.shared_bytes


def state_bytes(recipe: Recipe) -> float:
    """Bytes of one parameter of a matrix in training: master, moments, gradient, and what GEMMs read beside the master.

    That is nothing in fp32; bf16; or one copy of FP8 codes, which backward turns; with a split master (whose two halves
    are 4 bytes) an unquantised GEMM reads the bf16 half itself.
    """
    split = recipe.optimizer.master == "split"
    read = 1 if recipe.uses_fp8 else 0 if recipe.compute == "fp32" or split else 2
    return 4 + _moment_bytes(recipe) + (2 if recipe.optimizer.main_grad == "bf16" else 4) + read


def checkpoint_bytes(recipe: Recipe) -> float:
    """Bytes of one parameter of a matrix in a checkpoint: master and moments."""
    return 4 + _moment_bytes(recipe)


def _moment_bytes(recipe: Recipe) -> float:
    return sum(_stored_bytes(recipe, name) for name in (recipe.optimizer.m, recipe.optimizer.v))


def _stored_bytes(recipe: Recipe, name: str) -> float:
    """Bytes of one element in `fp32`, in `bf16`, or in codes of a spec with a float32 scale for each block."""
    spec = recipe.specs.get(name)
    if spec is None:
        return 4 if name == "fp32" else 2
    elements = 1 << 30 if isinstance(spec.block, str) else spec.block[0] * spec.block[1]
    return parse_format(spec.format).bits / 8 + 4 / elements


def excess_bytes(config: RunConfig, recipe: Recipe, room: int) -> int:
    """By how many bytes a step surely exceeds `room` bytes of GPU memory; 0 when it may fit.

    Plans come out up to 5 % above what was measured, so that much is left to them.
    """
    return max(0, round(make_plan(config, recipe).memory_bytes / MARGIN) - room)


def what_fits(config: RunConfig, recipe: Recipe, room: int) -> list[str]:
    """Single changes of a run, as options, with which a step may fit into `room` bytes."""
    train = config.train
    changes: list[tuple[str, dict[str, object], Recipe]] = []
    if config.cpt and config.cpt.micro_batch > 1:
        changes.append(("--micro-batch 1", {"micro_batch": 1}, recipe))
    if config.sft and (half := config.sft.row_tokens // 2 // ALIGNMENT * ALIGNMENT) >= config.sft.max_tokens:
        changes.append((f"--row-tokens {half}", {"row_tokens": half}, recipe))
    for mode in ("selective", "full"):
        if train.recompute != mode:
            changes.append((f"--recompute {mode}", {"recompute": mode}, recipe))
    if recipe.name == "infir2":
        changes.append(("--recipe infir2-lean", {}, load_recipe("infir2-lean")))
        changes.append(("--recipe infir2-lean --recompute full", {"recompute": "full"}, load_recipe("infir2-lean")))
    return [
        option
        for option, change, other in changes
        if not excess_bytes(config.model_copy(update={config.stage: train.model_copy(update=change)}), other, room)
    ]


def make_plan(config: RunConfig, recipe: Recipe) -> Plan:
    """Figures for `config`.

    - state: `state_bytes` a parameter
    - activations: what backward keeps of one microbatch, per layer and token (linear inputs are one byte in FP8, gate
      and up as `save.gate_up` says, the SwiGLU product is rebuilt), with the largest set of temporaries beside it:
      those of SwiGLU's backward, in bf16 and codes by kernels, in float32 by reference
    - shared: with one microbatch a step, backward frees a layer's activations before the next layer has gradients
    - disk: `checkpoint_bytes` a parameter, and one checkpoint more than is kept exists while it is written
    """
    train, shape = config.train, config.model
    tokens = train.micro_tokens
    of_run, context = _tokens(config)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wide = 2 if recipe.compute == "bf16" else 4
    narrow = 1 if recipe.uses_fp8 else wide
    normed = narrow * shape.hidden if recipe.save.norm_output == "kept" else 0
    attend = wide * (shape.hidden + q + 2 * kv + q) + normed + narrow * q
    gate_up = wide if recipe.save.gate_up == "bf16" else _stored_bytes(recipe, recipe.save.gate_up)
    feed = wide * shape.hidden + gate_up * 2 * shape.ffn + normed
    pair = 2 * wide * shape.hidden  # the residual stream and what is still to be added to it
    kept = {"none": attend + feed, "selective": attend + pair, "full": pair}[train.recompute]
    once = (attend + feed) if train.recompute == "full" else feed if train.recompute == "selective" else 0
    kernels = recipe.compute == "bf16" and block_scaled(recipe)
    temporaries = (3 * wide + 5 if kernels else 24) * shape.ffn + once
    # A chunk of logits, the head's weight as it is multiplied, and its gradient: the sum and the chunk's part.
    head = min(tokens * shape.vocab * wide, HEAD_CHUNK) + (2 * 4 + wide) * shape.vocab * shape.hidden
    gradients = (2 if recipe.optimizer.main_grad == "bf16" else 4) * shape.parameters
    one = config.cpt is not None and config.cpt.global_batch == config.cpt.micro_batch * config.ranks
    milestones = train.steps // train.keep_every if train.keep_every else 0
    checkpoint = round(checkpoint_bytes(recipe) * shape.parameters)
    return Plan(
        parameters=shape.parameters,
        tokens=of_run,
        tokens_per_step=of_run // train.steps,
        flops=of_run * shape.flops_per_token(context),
        state_bytes=round(state_bytes(recipe) * shape.parameters),
        activation_bytes=round(tokens * (shape.layers * kept + temporaries)) + head,
        shared_bytes=round(min(gradients, tokens * shape.layers * kept)) if one else 0,
        checkpoint_bytes=checkpoint,
        peak_disk_bytes=checkpoint * (train.keep_last + 1 + milestones),
    )


def _tokens(config: RunConfig) -> tuple[int, float]:
    """Tokens of a whole run, and the mean length of the sequence that one of them is in."""
    if config.cpt:
        return config.cpt.steps * config.cpt.global_batch * config.cpt.seq_len, config.cpt.seq_len
    sft, chat = config.sft, config.chat
    assert sft is not None and chat is not None
    samples = min(sft.steps * sft.global_batch, sft.epochs * chat.samples)
    return samples * chat.tokens // chat.samples, chat.context
