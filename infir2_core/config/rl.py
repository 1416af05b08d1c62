"""Settings of reinforcement learning: group-relative policy optimisation (GRPO) with the additions of DAPO.

A rollout step samples `samples_per_prompt` answers to each of `rollout_prompts` prompts, rewards them, turns rewards
into advantages within each group of answers to one prompt, and updates the weights once for every `global_batch`
answers. Terms are those of DAPO (arXiv 2503.14476). Like schema.py this file only says what a setting may be.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .schema import ALIGNMENT, TrainSettings

RlStage = Literal["1", "2"]  # short answers, then long ones


class RlSettings(TrainSettings):
    """Settings of one stage of reinforcement learning; defaults come from the preset of the chosen size.

    `steps` counts rollout steps, `global_batch` answers. Lengths count tokens.
    """

    schedule: Literal["cosine", "constant"]
    warmup_steps: int = Field(ge=0)
    rollout_prompts: int = Field(gt=0, description="prompts whose groups one rollout step trains on")
    samples_per_prompt: int = Field(ge=2, description="answers to a prompt, which are compared with each other")
    oversample_prompts: int = Field(gt=0, description="prompts that are begun at a time; the groups done first count")
    dynamic_filter: bool = Field(description="groups whose rewards are all equal are dropped, and others sampled")
    max_sampling_rounds: int = Field(gt=0, description="of over-sampling, before a rollout step gives up")
    max_prompt_tokens: int = Field(gt=0, description="longer prompts are left out")
    max_response_tokens: int = Field(gt=0, description="an answer is cut off there")
    temperature: float = Field(gt=0)
    sampler: Literal["builtin", "sglang"]
    sampler_memory: float = Field(gt=0, lt=1, description="share of a GPU's memory for SGLang's weights and cache")
    sampler_requests: int = Field(gt=0, description="answers that one engine samples at the same time")
    reward: Literal["deepscaler"]
    require_think: bool = Field(description="an answer without </think> gets no reward")
    overlong_penalty: bool = Field(description="the reward falls over the last `overlong_buffer` tokens of an answer")
    overlong_buffer: int = Field(gt=0)
    overlong_factor: float = Field(ge=0, description="penalty at `max_response_tokens`")
    clip_low: float = Field(gt=0, lt=1, description="probability ratios below 1 - clip_low are clipped")
    clip_high: float = Field(gt=0, description="probability ratios above 1 + clip_high are clipped")
    kl_coef: float = Field(ge=0, description="of the divergence from the weights that the stage started from")
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"]
    entropy_coef: float = Field(ge=0)
    loss_mean: Literal["sample", "token"]
    tis: bool = Field(description="truncated importance sampling between sampler and trainer")
    tis_cap: float = Field(ge=1, description="largest importance weight")
    row_tokens: int = Field(gt=0, description="most tokens of one forward and backward pass")
    eval_samples: int = Field(gt=0, description="answers to each prompt of an evaluation")
    eval_tokens: int = Field(gt=0, description="most tokens of such an answer")
    eval_temperature: float = Field(ge=0)
    eval_top_p: float = Field(gt=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> RlSettings:
        answers = self.rollout_prompts * self.samples_per_prompt
        if answers % self.global_batch:
            raise ValueError(
                f"rollout_prompts ({self.rollout_prompts}) times samples_per_prompt ({self.samples_per_prompt}) must "
                f"be a multiple of global_batch ({self.global_batch})"
            )
        if self.oversample_prompts < self.rollout_prompts:
            raise ValueError(
                f"oversample_prompts ({self.oversample_prompts}) is below rollout_prompts ({self.rollout_prompts})"
            )
        if self.row_tokens % ALIGNMENT:
            raise ValueError(f"row_tokens ({self.row_tokens}) must be a multiple of {ALIGNMENT}")
        if self.max_prompt_tokens + self.max_response_tokens > self.row_tokens:
            raise ValueError(
                f"max_prompt_tokens ({self.max_prompt_tokens}) and max_response_tokens ({self.max_response_tokens}) "
                f"together exceed row_tokens ({self.row_tokens})"
            )
        if self.overlong_penalty and self.overlong_buffer > self.max_response_tokens:
            raise ValueError(
                f"overlong_buffer ({self.overlong_buffer}) is above max_response_tokens ({self.max_response_tokens})"
            )
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) is above steps ({self.steps})")
        return self
