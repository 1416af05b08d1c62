"""What a run will take before it starts: tokens, memory a device, disk. Formulas, each with its source, no
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.schema import RunConfig
from ..precision.recipe import Recipe

# Bytes of one parameter in training, by what the recipe computes in: fp32 master, two fp32 moments, fp32 gradient, and
# what GEMMs read: nothing more in fp32, bf16, or the row and column copy of FP8 codes, which are as large.
STATE_BYTES = {"fp32": 4 + 8 + 4, "bf16": 4 + 8 + 4 + 2}
CHECKPOINT_BYTES = 4 + 8  # of one parameter: fp32 master and two fp32 moments
HEAD_CHUNK = 5 << 29  # CHUNK_BYTES of ops/loss.py (a test compares them), which would bring torch with it

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """Figures of a resolved run. Bytes are per device unless said."""

    parameters: int
    tokens: int
    tokens_per_step: int
    flops: float
    state_bytes: int
    activation_bytes: int
    checkpoint_bytes: int
    peak_disk_bytes: int

    @property
    def memory_bytes(self) -> int:
        """State and activations of one device."""
        return self.state_bytes + self.activation_bytes


def make_plan(config: RunConfig, recipe: Recipe) -> Plan:
    """Figures for `config`.

    - state: STATE_BYTES a parameter
    - activations: what backward keeps of one microbatch, per layer and token (linear inputs are one byte in FP8, the
      SwiGLU product is rebuilt), with the largest set of temporaries beside it
    - disk: a checkpoint holds master and moments, and one more than is kept exists while it is written
    """
    cpt, shape = config.cpt, config.model
    tokens = cpt.micro_batch * cpt.seq_len
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wide = 2 if recipe.compute == "bf16" else 4
    narrow = 1 if recipe.uses_fp8 else wide
    attend = wide * (shape.hidden + q + 2 * kv + q) + narrow * (shape.hidden + q)
    feed = wide * (shape.hidden + 2 * shape.ffn) + narrow * shape.hidden
    pair = 2 * wide * shape.hidden  # the residual stream and what is still to be added to it
    kept = {"none": attend + feed, "selective": attend + pair, "full": pair}[cpt.recompute]
    once = (attend + feed) if cpt.recompute == "full" else feed if cpt.recompute == "selective" else 0
    temporaries = 4 * 3 * 2 * shape.ffn + once
    # A chunk of logits, and the head's gradient: the sum, the chunk's part, and the copy that backward scales.
    head = min(tokens * shape.vocab * wide, HEAD_CHUNK) + 3 * 4 * shape.vocab * shape.hidden
    milestones = cpt.steps // cpt.keep_every if cpt.keep_every else 0
    checkpoint = CHECKPOINT_BYTES * shape.parameters
    return Plan(
        parameters=shape.parameters,
        tokens=cpt.steps * cpt.global_batch * cpt.seq_len,
        tokens_per_step=cpt.global_batch * cpt.seq_len,
        flops=float(cpt.steps) * cpt.global_batch * cpt.seq_len * shape.flops_per_token(cpt.seq_len),
        state_bytes=shape.parameters * STATE_BYTES[recipe.compute],
        activation_bytes=tokens * (shape.layers * kept + temporaries) + head,
        checkpoint_bytes=checkpoint,
        peak_disk_bytes=checkpoint * (cpt.keep_last + 1 + milestones),
    )
