"""config.json of every published Qwen2.5 size, read as transformers reads it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infir2_core.config.hf_config import shape_from_hf, shape_to_hf
from infir2_core.config.presets import load_preset
from infir2_core.config.schema import ModelShape
from infir2_core.errors import InputError

# As published on the hub: hidden, ffn, layers, heads, kv heads, vocab, tied.
SIZES = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
# variant -> positions, rope base, layers without a window
VARIANTS = {
    ("0.5b", "base"): (32768, 1000000.0, 24),
    ("1.5b", "base"): (131072, 1000000.0, 28),
    ("3b", "base"): (32768, 1000000.0, 36),
    ("7b", "base"): (131072, 1000000.0, 28),
    ("0.5b", "instruct"): (32768, 1000000.0, 21),
    ("1.5b", "instruct"): (32768, 1000000.0, 21),
    ("3b", "instruct"): (32768, 1000000.0, 70),
    ("7b", "instruct"): (32768, 1000000.0, 28),
    ("1.5b", "math"): (4096, 10000, 21),
    ("7b", "math"): (4096, 10000, 28),
}


def published(size: str, variant: str) -> dict[str, Any]:
    hidden, ffn, layers, heads, kv_heads, vocab, tied = SIZES[size]
    positions, theta, window = VARIANTS[size, variant]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": positions,
        "max_window_layers": window,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": theta,
        "sliding_window": positions,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }


def as_transformers_reads(config: dict[str, Any]) -> ModelShape:
    """An independent reader: the attributes of transformers' own config class."""
    from transformers import Qwen2Config

    read = Qwen2Config(**config)
    return ModelShape(
        layers=read.num_hidden_layers,
        hidden=read.hidden_size,
        ffn=read.intermediate_size,
        heads=read.num_attention_heads,
        kv_heads=read.num_key_value_heads,
        head_dim=getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads,
        vocab=read.vocab_size,
        tied=read.tie_word_embeddings,
        rope_base=read.rope_parameters["rope_theta"],
        max_positions=read.max_position_embeddings,
        norm_eps=read.rms_norm_eps,
    )


@pytest.mark.parametrize(("size", "variant"), VARIANTS)
def test_published_configs_read_as_in_transformers(size: str, variant: str) -> None:
    config = published(size, variant)
    shape = shape_from_hf(config, "config.json")
    assert shape == as_transformers_reads(config)
    positions, theta, _ = VARIANTS[size, variant]
    assert shape == load_preset(size).model.model_copy(update={"max_positions": positions, "rope_base": theta})


@pytest.mark.parametrize(("size", "variant"), VARIANTS)
def test_what_transformers_5_writes_reads_the_same(size: str, variant: str) -> None:
    from transformers import Qwen2Config

    config = published(size, variant)
    rewritten = Qwen2Config(**config).to_dict()
    assert "rope_theta" not in rewritten
    assert shape_from_hf(rewritten, "config.json") == shape_from_hf(config, "config.json")


kv = st.integers(1, 4)
shapes = st.builds(
    lambda kv_heads, groups, half, hidden, **rest: ModelShape(
        kv_heads=kv_heads, heads=kv_heads * groups, head_dim=2 * half, hidden=hidden, **rest
    ),
    kv_heads=kv,
    groups=kv,
    half=st.integers(1, 64),
    hidden=st.integers(1, 4096),
    layers=st.integers(1, 100),
    ffn=st.integers(1, 20000),
    vocab=st.integers(1, 300000),
    tied=st.booleans(),
    rope_base=st.floats(1, 1e8),
    max_positions=st.integers(1, 200000),
    norm_eps=st.floats(1e-12, 1e-3),
)


@given(shapes)
def test_written_configs_come_back_and_transformers_agrees(shape: ModelShape) -> None:
    config = shape_to_hf(shape, "float32")
    assert shape_from_hf(config, "config.json") == shape
    assert as_transformers_reads(config) == shape
    # A reader that knows only one of the two spellings finds the same rope base.
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == shape.rope_base
    assert config["dtype"] == config["torch_dtype"] == "float32"


def test_only_the_newer_spelling_and_a_null_kv_heads() -> None:
    config = published("7b", "math")
    del config["rope_theta"]
    config |= {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "num_key_value_heads": None}
    shape = shape_from_hf(config, "config.json")
    assert shape == as_transformers_reads(config)
    assert (shape.rope_base, shape.kv_heads) == (5e5, 28)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen3"}, ["'qwen3'", "Did you mean 'qwen2'?"]),
        ({"model_type": None}, ["model_type is None", "Valid: qwen2."]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
        ({"use_sliding_window": True}, ["use_sliding_window = True"]),
        ({"use_mrope": True}, ["use_mrope = True"]),
        ({"attention_bias": False}, ["attention_bias = False"]),
        ({"mlp_bias": True}, ["mlp_bias = True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout = 0.1"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["'yarn'", "rope_scaling"]),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}}, ["'linear'", "rope_parameters"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["per layer type"]),
        ({"rope_parameters": {"rope_theta": 5e5}}, ["rope_theta = 1e+06", "rope_parameters.rope_theta = 500000"]),
        ({"rope_parameters": 7}, ["rope_parameters must be an object"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantised (fp8)"]),
        ({"num_hidden_layers": None}, ["'num_hidden_layers' is missing"]),
        ({"hidden_size": "896"}, ["hidden_size must be a positive whole number, not '896'"]),
        ({"vocab_size": True}, ["vocab_size must be a positive whole number, not True"]),
        ({"hidden_size": 1000}, ["hidden_size (1000) is not a multiple of num_attention_heads (14)"]),
        ({"num_key_value_heads": 4}, ["heads (14) must be a multiple of kv_heads (4)"]),
        ({"head_dim": 63}, ["head_dim (63) must be even"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps must be a positive number"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings must be true or false"]),
    ],
)
def test_what_this_decoder_does_not_compute_is_refused_by_name(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        shape_from_hf(published("0.5b", "base") | change, "M/config.json")
    assert caught.value.exit_code == 3
    assert caught.value.where.startswith("M/config.json")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_key_value_heads", "vocab_size"])
def test_a_missing_key_is_named(key: str) -> None:
    config = published("0.5b", "base")
    del config[key]
    with pytest.raises(InputError, match=f"'{key}' is missing"):
        shape_from_hf(config, "config.json")
