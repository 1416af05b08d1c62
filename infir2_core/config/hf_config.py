"""config.json of a Hugging Face folder to `ModelShape` and back.

Published Qwen2.5 models differ between base, Instruct and Math (rope base, positions, vocabulary), and transformers 5
moved `rope_theta` into `rope_parameters`; both spellings are read and written. What this decoder does not compute
(scaled rope, sliding windows, other activations, quantised weights) is refused by name instead of being trained
wrongly. Reading and writing the file itself is left to the caller.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ..errors import InputError, nearest
from .schema import ModelShape
from .toml import problems

MODEL_TYPES = ("qwen2",)
# ModelShape field -> HF key; head_dim, rope_base and tied have rules of their own below.
KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "head_dim": "head_dim",
    "rope_base": "rope_theta",
    "tied": "tie_word_embeddings",
}
DTYPE_NAMES = ("bfloat16", "float16", "float32", "float64")  # of weights, as config.json spells them
_COUNTS = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
# What transformers' Qwen2Config assumes for a key that the file leaves out.
_DEFAULT_THETA, _DEFAULT_POSITIONS, _DEFAULT_EPS = 10000.0, 32768, 1e-6
# Key -> values this decoder computes. A key that is absent, or null, is fine.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "attention_bias": (True,),  # Qwen2 always has biases on q, k and v ...
    "mlp_bias": (False,),  # ... and nowhere else
    "attention_dropout": (0, 0.0),
}


def shape_from_hf(config: dict[str, Any], where: str) -> ModelShape:
    """The architecture described by a parsed config.json.

    Args:
        where: the file, as shown in errors.

    Raises:
        InputError: another kind of model, a key that is missing or of the wrong type, or a variant not computed here.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        hint = nearest(str(kind), MODEL_TYPES) if kind else f"Valid: {', '.join(MODEL_TYPES)}."
        raise InputError(
            f"model_type is {kind!r}; infir2 trains Qwen2.5-family models only", f"{where}: model_type", hint
        )
    refuse_malformed(config, where)
    _refuse_variants(config, where)
    values: dict[str, Any] = {name: _count(config, KEYS[name], where) for name in _COUNTS if name != "kv_heads"}
    heads = values["heads"]
    values["kv_heads"] = _count(config, KEYS["kv_heads"], where, heads if KEYS["kv_heads"] in config else None)
    if config.get("head_dim") is None and values["hidden"] % heads:
        what = f"hidden_size ({values['hidden']}) is not a multiple of num_attention_heads ({heads}), "
        raise InputError(what + "and head_dim is not given", where)
    values["head_dim"] = _count(config, "head_dim", where, values["hidden"] // heads)
    values["max_positions"] = _count(config, KEYS["max_positions"], where, _DEFAULT_POSITIONS)
    values["norm_eps"] = _number(config, KEYS["norm_eps"], where, _DEFAULT_EPS)
    values["rope_base"] = _rope_base(config, where)
    values["tied"] = config.get(KEYS["tied"], False)
    if not isinstance(values["tied"], bool):
        raise InputError(f"tie_word_embeddings must be true or false, not {values['tied']!r}", where)
    try:
        return ModelShape(**values)
    except ValidationError as error:
        raise InputError("; ".join(message for _, message in problems(error, ModelShape)), where) from error


def shape_to_hf(shape: ModelShape, dtype: str = "bfloat16") -> dict[str, Any]:
    """A config.json that transformers 4 and 5 read as this architecture.

    Args:
        dtype: of the weights beside it, as transformers spells it.
    """
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
    }
    config |= {
        KEYS[name]: getattr(shape, name) for name in (*_COUNTS, "max_positions", "norm_eps", "rope_base", "tied")
    }
    if shape.head_dim * shape.heads != shape.hidden:
        config["head_dim"] = shape.head_dim
    # transformers 4 knows rope_theta and torch_dtype, transformers 5 rope_parameters and dtype.
    config["rope_parameters"] = {"rope_theta": shape.rope_base, "rope_type": "default"}
    config["dtype"] = config["torch_dtype"] = dtype
    return config


def refuse_malformed(config: dict[str, Any], where: str) -> None:
    """InputError for keys that no loader could read, whatever the model computes."""
    kinds = config.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise InputError(f"layer_types must be a list, not {kinds!r}", f"{where}: layer_types")
    for key in ("dtype", "torch_dtype"):
        said = config.get(key)
        if said is not None and said not in DTYPE_NAMES:
            hint = nearest(str(said), DTYPE_NAMES)
            raise InputError(f"{key} is {said!r}, which names no dtype of weights", f"{where}: {key}", hint)


def _refuse_variants(config: dict[str, Any], where: str) -> None:
    for key, allowed in _SUPPORTED.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            raise InputError(
                f"{key} = {value!r} is not supported; infir2 computes {key} = {allowed[0]!r}", f"{where}: {key}"
            )
    other = sorted({str(kind) for kind in config.get("layer_types") or [] if kind != "full_attention"})
    if other:
        raise InputError(
            f"layer_types has {', '.join(other)}; infir2 computes full_attention only", f"{where}: layer_types"
        )
    if config.get("quantization_config"):
        given = config["quantization_config"]
        method = given.get("quant_method", "unknown method") if isinstance(given, dict) else given
        what = f"the weights are quantised ({method}); training starts from bf16, fp16 or fp32 weights"
        raise InputError(what, f"{where}: quantization_config", "load the model it was quantised from")


def _rope_base(config: dict[str, Any], where: str) -> float:
    """rope_theta, from wherever it stands; scaled rope is refused."""
    found: dict[str, float] = {}
    if config.get("rope_theta") is not None:
        found["rope_theta"] = _number(config, "rope_theta", where, _DEFAULT_THETA)
    for key in ("rope_parameters", "rope_scaling"):  # the second is how transformers 4 spelled it
        table = config.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            raise InputError(f"{key} must be an object, not {table!r}", f"{where}: {key}")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default" or any(isinstance(value, dict) for value in table.values()):
            scaling = kind if kind != "default" else "per layer type"
            what = f"rope scaling '{scaling}' is not supported; infir2 computes plain rope"
            raise InputError(what, f"{where}: {key}", f"remove {key} to train within the unscaled positions")
        if table.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = _number(table, "rope_theta", f"{where}: {key}", _DEFAULT_THETA)
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{key} = {value:g}" for key, value in found.items())
        raise InputError(f"two different rope bases: {listed}", where, "keep the one the model was trained with")
    return next(iter(found.values()), _DEFAULT_THETA)


def _count(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise InputError(f"'{key}' is missing", where, "this is not the config.json of a Qwen2.5 model")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{key} must be a positive whole number, not {value!r}", f"{where}: {key}")
    return value


def _number(config: dict[str, Any], key: str, where: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise InputError(f"{key} must be a positive number, not {value!r}", f"{where}: {key}")
    return float(value)
