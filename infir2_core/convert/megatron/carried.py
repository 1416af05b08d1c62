"""Which arguments of Megatron-LM and slime are settings of ours, and what those programs do where a script is silent.

Tables only; project.py reads them. Values are as the scripts give them.
"""

from __future__ import annotations

from typing import Any

from .arguments import MODEL

# Megatron's name -> ours in [cpt]; the value is taken as it is.
CARRIED = {
    "train_iters": "steps",
    "seq_length": "seq_len",
    "global_batch_size": "global_batch",
    "micro_batch_size": "micro_batch",
    "lr": "lr",
    "min_lr": "min_lr",
    "lr_warmup_iters": "warmup_steps",
    "lr_wsd_decay_iters": "decay_steps",
    "weight_decay": "weight_decay",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_eps": "eps",
    "clip_grad": "clip",
    "seed": "seed",
    "init_method_std": "init_std",
    "split": "split",
    "eval_interval": "eval_every",
    "eval_iters": "eval_iters",
    "save_interval": "save_every",
}
# slime's name -> ours in [sft.N].
CARRIED_SFT = {
    "num_epoch": "epochs",
    "global_batch_size": "global_batch",
    "max_tokens_per_gpu": "row_tokens",
    "lr_warmup_fraction": "warmup_share",
    **{name: CARRIED[name] for name in (
        "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "seed", "save_interval",
    )},
}  # fmt: skip
# slime's name -> ours in [rl.N]: numbers, then words of which we know some.
CARRIED_RL = {
    "num_rollout": "steps",
    "global_batch_size": "global_batch",
    "lr_warmup_iters": "warmup_steps",
    "rollout_batch_size": "rollout_prompts",
    "n_samples_per_prompt": "samples_per_prompt",
    "over_sampling_batch_size": "oversample_prompts",
    "rollout_max_prompt_len": "max_prompt_tokens",
    "rollout_max_response_len": "max_response_tokens",
    "rollout_temperature": "temperature",
    "sglang_mem_fraction_static": "sampler_memory",
    "sglang_max_running_requests": "sampler_requests",
    "length_penalty_buffer": "overlong_buffer",
    "length_penalty_factor": "overlong_factor",
    "eps_clip": "clip_low",
    "eps_clip_high": "clip_high",
    "kl_loss_coef": "kl_coef",
    "entropy_coef": "entropy_coef",
    "tis_clip": "tis_cap",
    "max_tokens_per_gpu": "row_tokens",
    "n_samples_per_eval_prompt": "eval_samples",
    "eval_max_response_len": "eval_tokens",
    "eval_temperature": "eval_temperature",
    "eval_top_p": "eval_top_p",
    **{name: CARRIED[name] for name in (
        "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "seed", "eval_interval",
        "save_interval",
    )},
}  # fmt: skip
WORDS_RL = {"rm_type": "reward", "kl_loss_type": "kl_estimator"}
# slime's name -> our setting, the value that the flag stands for (None: any without one), and ours with and without it.
SWITCHES_RL: dict[str, tuple[str, str | None, Any, Any]] = {
    "use_tis": ("tis", None, True, False),
    "enable_length_penalty": ("overlong_penalty", None, True, False),
    "calculate_per_token_loss": ("loss_mean", None, "token", "sample"),
    "dynamic_sampling_filter_path": ("dynamic_filter", "check_reward_nonzero_std", True, False),
}
# What Megatron-LM does when a script does not say.
DEFAULTS = {
    "weight_decay": "0.01", "adam_beta1": "0.9", "adam_beta2": "0.999", "adam_eps": "1e-08", "clip_grad": "1.0",
    "seed": "1234", "init_method_std": "0.02", "eval_interval": "1000", "eval_iters": "100", "lr_warmup_iters": "0",
}  # fmt: skip
# What slime does when a script of reinforcement learning does not say: a value, or that of another argument.
DEFAULTS_RL = {
    **{name: DEFAULTS[name] for name in (
        "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "seed", "lr_warmup_iters",
    )},
    "lr": "1e-06", "eval_interval": "0", "n_samples_per_prompt": "1", "rollout_temperature": "1.0", "eps_clip": "0.2",
    "kl_loss_coef": "0.0", "kl_loss_type": "k1", "entropy_coef": "0.0", "tis_clip": "2.0",
    "n_samples_per_eval_prompt": "1", "rollout_top_p": "1.0",
}  # fmt: skip
SAME_RL = {
    "over_sampling_batch_size": "rollout_batch_size",
    "eps_clip_high": "eps_clip",
    "eval_max_response_len": "rollout_max_response_len",
    "eval_temperature": "rollout_temperature",
    "eval_top_p": "rollout_top_p",
}
SHAPE = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn",
    "num_attention_heads": "heads",
    "num_query_groups": "kv_heads",
}
# Flags that say what every model and run of ours is; with another value they are not carried over.
IMPLIED: dict[str, tuple[Any, ...]] = {
    **MODEL,
    "disable_bias_linear": (True,),
    "group_query_attention": (True,),
    "use_rotary_position_embeddings": (True,),
    "attention_dropout": (0.0,),
    "hidden_dropout": (0.0,),
    "bf16": (True,),
    "lr_wsd_decay_style": ("cosine",),
    "use_mcore_models": (True,),
    "optimizer": ("adam",),
}
IMPLIED_RL: dict[str, tuple[Any, ...]] = {
    "loss_type": ("policy_loss",),
    "advantage_estimator": ("grpo",),
    "kl_coef": (0.0,),
    "tis_clip_low": (0.0,),
    "rollout_top_p": (1.0,),
    "rollout_top_k": (-1,),
    "rollout_shuffle": (True,),
    "apply_chat_template": (True,),
    "input_key": ("prompt",),
    "label_key": ("label",),
    "use_dynamic_batch_size": (True,),
}
# Flags about GPUs and nodes that do not say so in their names.
LAYOUT = (
    "overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "actor_num_nodes",
    "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine", "num_gpus_per_node", "colocate",
    "balance_data",
)  # fmt: skip
