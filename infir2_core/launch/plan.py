"""What a run will take before it starts: tokens, memory a device, disk. Formulas, each with its source, no
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.schema import RunConfig
from ..precision.recipe import Recipe

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

    - state: float32 master, two moments and gradient, 16 bytes a parameter, and the copy that GEMMs read (codes,
    bf16, or
      none in float32)
    - activations: what backward keeps of one microbatch, per layer and token (reference/performance: 10 h + qkv + 6 f
    bytes
      pairs for bf16; linear inputs are one byte in FP8), with the largest set of temporaries beside it
    - disk: a checkpoint holds master and moments, and one more than is kept exists while it is written
    """
    cpt, shape = config.cpt, config.model
    tokens = cpt.micro_batch * cpt.seq_len
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wide = 2 if recipe.compute == "bf16" else 4
    narrow = 1 if recipe.uses_fp8 else wide
    attend = wide * (2 * shape.hidden + 2 * q + 2 * kv + q) + narrow * (shape.hidden + q)
    feed = wide * (shape.hidden + 2 * shape.ffn) + narrow * (shape.hidden + shape.ffn)
    kept = {"none": attend + feed, "selective": attend + wide * shape.hidden, "full": wide * shape.hidden}[
        cpt.recompute
    ]
    once = (attend + feed) if cpt.recompute == "full" else feed if cpt.recompute == "selective" else 0
    temporaries = 4 * 3 * 2 * shape.ffn + once
    head = min(tokens * shape.vocab * 4, 1 << 30) * 3
    milestones = cpt.steps // cpt.keep_every if cpt.keep_every else 0
    checkpoint = 12 * shape.parameters
    copies = {"fp32": 0, "bf16": 2}[recipe.compute] if not recipe.uses_fp8 else 1
    return Plan(
        parameters=shape.parameters,
        tokens=cpt.steps * cpt.global_batch * cpt.seq_len,
        tokens_per_step=cpt.global_batch * cpt.seq_len,
        flops=float(cpt.steps) * cpt.global_batch * cpt.seq_len * shape.flops_per_token(cpt.seq_len),
        state_bytes=shape.parameters * (16 + copies),
        activation_bytes=tokens * (shape.layers * kept + temporaries) + head,
        checkpoint_bytes=checkpoint,
        peak_disk_bytes=checkpoint * (cpt.keep_last + 1 + milestones),
    )
