"""Megatron's arguments inside a checkpoint: which models they may describe here, and their values, checked.

An argument changes what the weights mean without leaving a trace in them (rotary embeddings, norms, activations), so
whatever a Qwen2.5 decoder does not compute is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError

PADDING = 1024  # as many rows of the vocabulary, or more, are no padding, unless the args pad further
# Argument -> the values under which Megatron computes a Qwen2.5 decoder; the first is what it is called by.
MODEL: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "use_rope_scaling": (False,),
    "rotary_seq_len_interpolation_factor": (1, None),
    "no_rope_freq": (None, 0),
    "normalization": ("RMSNorm",),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "qk_layernorm": (False,),
    "qk_l2_norm": (False,),
    "swiglu": (True,),
    "squared_relu": (False,),
    "openai_gelu": (False,),
    "quick_geglu": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    "add_bias_linear": (False,),
    "add_qkv_bias": (True,),
    "multi_latent_attention": (False,),
    "window_size": (None, (-1, -1), (-1, 0)),
    "softmax_type": ("vanilla",),
    "attention_output_gate": (False,),
    "num_experts": (None, 0),
    "is_hybrid_model": (False,),
}


def check_model(arguments: Mapping[str, Any], where: Path) -> None:
    """Refuses the arguments of a model that computes something else than a Qwen2.5 decoder.

    Raises:
        InputError: naming the first such argument and its value.
    """
    for name, allowed in MODEL.items():
        value = arguments.get(name)
        value = tuple(value) if isinstance(value, list) else value
        if value is None or value in allowed:
            continue
        what = f"the checkpoint was trained with {name} = {value}; here it can only be {allowed[0]}"
        raise InputError(what, str(where), "only Qwen2.5-family models are converted")


def read_count(arguments: Mapping[str, Any], name: str, where: Path) -> int | None:
    """A positive integer; None when it was not saved.

    Raises:
        InputError: it is something else.
    """
    value = arguments.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise _wrong(name, value, "a positive integer", where)


def read_number(arguments: Mapping[str, Any], name: str, where: Path) -> float | None:
    """A positive number; None when it was not saved.

    Raises:
        InputError: it is something else.
    """
    value = arguments.get(name)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise _wrong(name, value, "a positive number", where)


def _wrong(name: str, value: Any, expected: str, where: Path) -> InputError:
    what = f"the checkpoint's args say {name} = {value!r}, expected {expected}"
    return InputError(what, str(where), f"mend {name} in the args, or copy the checkpoint again")
