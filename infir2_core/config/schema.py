"""What a run is made of, as strict data.

`RunConfig` is the only thing a training process reads: it is resolved once (resolve.py), written to the run folder as
config.toml before anything starts, and read back by every process. Every model here refuses unknown keys.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FORMAT = 1  # version number of project files and run folders
Size = Literal["tiny", "small", "0.5b", "1.5b", "3b", "7b"]
SIZES: tuple[str, ...] = ("tiny", "small", "0.5b", "1.5b", "3b", "7b")
SftStage = Literal["1", "2"]
SCRATCH_SIZES = ("tiny", "small")  # sizes that start from random weights unless told otherwise


class Strict(BaseModel):
    """Immutable; an unknown key or a number that is not finite is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelShape(Strict):
    """Architecture of a Qwen2.5-family decoder. Lengths count elements; `vocab` counts rows of the embedding.

    The bounds are far above any model; they keep a damaged config from asking for endless work.
    """

    layers: int = Field(gt=0, le=1 << 13)
    hidden: int = Field(gt=0, le=1 << 20)
    ffn: int = Field(gt=0, le=1 << 22)
    heads: int = Field(gt=0, le=1 << 13)
    kv_heads: int = Field(gt=0, le=1 << 13)
    head_dim: int = Field(gt=0, le=1 << 13)
    vocab: int = Field(gt=0, le=1 << 28)
    tied: bool
    rope_base: float = 1e6
    max_positions: int = Field(32768, gt=0)
    norm_eps: float = 1e-6

    @model_validator(mode="after")
    def _check(self) -> ModelShape:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary embedding")
        return self

    @property
    def parameters(self) -> int:
        """Number of trained parameters, embedding and head included (a tied head counts once)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = (
            self.hidden * (q + 2 * kv) + (q + 2 * kv) + q * self.hidden + 3 * self.hidden * self.ffn + 2 * self.hidden
        )
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    def flops_per_token(self, seq_len: float) -> float:
        """Model FLOPs of one trained token (forward and backward), causal attention counted once."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear = self.hidden * (q + 2 * kv) + q * self.hidden + 3 * self.hidden * self.ffn
        attention = 2 * q * seq_len / 2  # scores and weighted sum, half of them masked
        return 6.0 * (self.layers * (linear + attention) + self.vocab * self.hidden)


class Blend(Strict):
    """One corpus of a mixture: a Megatron `.bin/.idx` prefix, or a file or folder of chats, and its share."""

    prefix: str
    weight: float = Field(1.0, gt=0)
    content: str = Field("", description="digest of what the corpus holds, so that a run never goes on with other data")


class TrainSettings(Strict):
    """What both kinds of training have in common. Batches count sequences, learning rates are absolute."""

    recipe: str
    steps: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    schedule: Literal["wsd", "cosine", "constant"]
    lr: float = Field(gt=0)
    min_lr: float = Field(ge=0)
    weight_decay: float = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    eps: float = Field(gt=0)
    clip: float = Field(ge=0, description="global gradient norm; 0 turns clipping off")
    seed: int = Field(ge=0, lt=2**32)
    init_std: float = Field(gt=0)
    eval_every: int = Field(ge=0, description="0 turns validation off")
    save_every: int = Field(gt=0)
    keep_last: int = Field(ge=1)
    keep_every: int = Field(
        ge=0, description="checkpoints at multiples of this are kept until the decay is done; 0: none"
    )
    recompute: Literal["none", "selective", "full"]
    max_skips: int = Field(ge=0, description="non-finite steps in a row that are skipped before the run gives up")

    @model_validator(mode="after")
    def _check_rates(self) -> TrainSettings:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) is above lr ({self.lr})")
        return self


class CptSettings(TrainSettings):
    """Settings of continual pre-training; defaults come from the preset of the chosen size. `seq_len` counts tokens."""

    seq_len: int = Field(gt=1)
    micro_batch: int = Field(gt=0)
    warmup_steps: int = Field(ge=0)
    decay_steps: int = Field(ge=0)
    split: str
    eval_iters: int = Field(gt=0)

    @property
    def micro_tokens(self) -> int:
        """Tokens of one forward and backward pass."""
        return self.micro_batch * self.seq_len

    @model_validator(mode="after")
    def _check(self) -> CptSettings:
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch ({self.global_batch}) must be a multiple of micro_batch ({self.micro_batch})"
            )
        if (
            self.schedule != "constant"
            and self.warmup_steps + (self.decay_steps if self.schedule == "wsd" else 0) > self.steps
        ):
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) + decay_steps ({self.decay_steps}) exceed steps ({self.steps})"
            )
        parts = self.split.split(",")
        if len(parts) != 3 or not all(p.replace(".", "", 1).isdecimal() for p in parts) or float(parts[0]) <= 0:
            raise ValueError(
                f"split must be three shares for train, validation and test such as '90,5,5', got '{self.split}'"
            )
        return self


ALIGNMENT = 128  # microbatches of fine-tuning are filled up to a multiple of this: the blocks of FP8 recipes


class SftSettings(TrainSettings):
    """Settings of one stage of fine-tuning; defaults come from the preset of the chosen size.

    `steps` is 0 in presets and project files, which stands for as many as `epochs` take; in a run it is worked out.
    """

    steps: int = Field(ge=0, description="0: as many as `epochs` take")
    epochs: int = Field(gt=0, description="how often each sample is trained on")
    schedule: Literal["cosine", "constant"]
    warmup_share: float = Field(ge=0, le=1, description="share of the steps that the rate rises linearly")
    row_tokens: int = Field(gt=0, description="most tokens of one forward and backward pass")
    max_tokens: int = Field(gt=1, description="most tokens of a sample")
    too_long: Literal["drop", "truncate"]
    max_bad_share: float = Field(ge=0, le=1, description="of samples that cannot be used, before the run refuses")
    eval_share: float = Field(ge=0, lt=1, description="of samples that are held out")
    prompts: list[str] = Field(description="answered at each evaluation; none: the first prompts that are held out")
    answers: int = Field(ge=0, description="held-out prompts that are answered at each evaluation")
    answer_tokens: int = Field(gt=0, description="most tokens of such an answer")

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return int(self.warmup_share * self.steps)

    @property
    def decay_steps(self) -> int:
        """Without meaning for the schedules of fine-tuning."""
        return 0

    @property
    def micro_tokens(self) -> int:
        """Tokens of one forward and backward pass, at most."""
        return self.row_tokens

    @model_validator(mode="after")
    def _check(self) -> SftSettings:
        if self.row_tokens % ALIGNMENT:
            raise ValueError(f"row_tokens ({self.row_tokens}) must be a multiple of {ALIGNMENT}")
        if self.max_tokens > self.row_tokens:
            raise ValueError(f"max_tokens ({self.max_tokens}) is above row_tokens ({self.row_tokens})")
        return self


class ChatData(Strict):
    """What a tokenised chat set holds. Tokens are those of one epoch; `context` is the mean length around a token."""

    samples: int = Field(gt=0)
    held_out: int = Field(ge=0)
    tokens: int = Field(gt=0)
    trained_tokens: int = Field(gt=0)
    context: float = Field(gt=0)
    turn_end: int = Field(ge=0, description="id that ends an assistant's turn")


class Source(Strict):
    """Where the weights come from: `scratch`, an HF folder, or a native checkpoint folder."""

    kind: Literal["scratch", "hf", "checkpoint"]
    path: str = ""
    optimizer: bool = False  # decay phase: optimizer, data position and quantiser state come along
    check: bool = True  # stop when loaded weights score like untrained ones at step 0


class RunConfig(Strict):
    """A fully resolved run. The settings of its own stage are there, those of others are not."""

    format: int = FORMAT
    stage: Literal["cpt", "sft"] = "cpt"
    phase: Literal["full", "decay", "1", "2"] = "full"  # the last two are the stages of fine-tuning
    name: str
    runs: str
    size: str
    model: ModelShape
    source: Source
    data: list[Blend]
    tokenizer: str = ""  # as recorded by `data prepare`; empty when the prefixes do not say
    chat: ChatData | None = None
    cpt: CptSettings | None = None
    sft: SftSettings | None = None
    device: str = "cpu"
    ranks: int = Field(1, gt=0)
    deterministic: bool = False

    @model_validator(mode="after")
    def _one_stage(self) -> RunConfig:
        wanted = {"cpt": (True, False, False), "sft": (False, True, True)}[self.stage]
        if tuple(part is not None for part in (self.cpt, self.sft, self.chat)) != wanted:
            raise ValueError(f"a run of stage {self.stage} has the settings of that stage and of no other")
        return self

    @property
    def train(self) -> CptSettings | SftSettings:
        """The settings of the run's own stage."""
        found = self.cpt or self.sft
        assert found is not None
        return found

    @property
    def title(self) -> str:
        """cpt, cpt-decay, sft-1 or sft-2."""
        return self.stage if self.phase == "full" else f"{self.stage}-{self.phase}"
