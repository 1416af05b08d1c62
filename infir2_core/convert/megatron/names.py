"""Where each Hugging Face tensor of a Qwen2.5 model lies in Megatron's GPTModel.

Megatron fuses q, k and v group by group: for each key/value head come the rows of its query heads, then its k rows,
then its v rows. Gate and up are one tensor, gate before up, or, in newer checkpoints, two (`_w` and `_v`). Layers are
stacked along a leading axis, or each has its number in the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...config.schema import ModelShape

EMBEDDING, HEAD, NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
QKV, PROJ = "self_attention.linear_qkv", "self_attention.linear_proj"
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
# Norms belong to the linear after them (TransformerEngine) or stand alone (other layer specs).
NORM1 = (f"{QKV}.layer_norm_weight", "input_layernorm.weight")
NORM2 = (f"{FC1}.layer_norm_weight", "pre_mlp_layernorm.weight")
LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")

Segments = Iterator[tuple[int, int]]  # first row in the source and number of rows, in order


@dataclass(frozen=True)
class Place:
    """A Hugging Face tensor's rows in a tensor of Megatron: `names` that may hold it, the layer it belongs to.

    `segments(first, count)` turns rows of the Hugging Face tensor into runs of rows of the source.
    """

    names: tuple[str, ...]
    layer: int | None
    segments: Callable[[int, int], Segments]


def places(shape: ModelShape, split_fc1: bool = False) -> dict[str, Place]:
    """Hugging Face name -> place. `split_fc1`: gate and up are tensors of their own."""
    found = {"model.embed_tokens.weight": Place((EMBEDDING,), None, _same)}
    for i in range(shape.layers):
        hf = f"model.layers.{i}"
        for kind in ("q", "k", "v"):
            take = _heads(shape, kind)
            found[f"{hf}.self_attn.{kind}_proj.weight"] = Place((f"{QKV}.weight",), i, take)
            found[f"{hf}.self_attn.{kind}_proj.bias"] = Place((f"{QKV}.bias",), i, take)
        found[f"{hf}.self_attn.o_proj.weight"] = Place((f"{PROJ}.weight",), i, _same)
        gate, up = ((f"{FC1}.weight_w",), (f"{FC1}.weight_v",)) if split_fc1 else ((f"{FC1}.weight",),) * 2
        found[f"{hf}.mlp.gate_proj.weight"] = Place(gate, i, _same)
        found[f"{hf}.mlp.up_proj.weight"] = Place(up, i, _same if split_fc1 else _after(shape.ffn))
        found[f"{hf}.mlp.down_proj.weight"] = Place((f"{FC2}.weight",), i, _same)
        found[f"{hf}.input_layernorm.weight"] = Place(NORM1, i, _same)
        found[f"{hf}.post_attention_layernorm.weight"] = Place(NORM2, i, _same)
    found["model.norm.weight"] = Place((NORM,), None, _same)
    if not shape.tied:
        found["lm_head.weight"] = Place((HEAD,), None, _same)
    return found


def _same(first: int, count: int) -> Segments:
    yield first, count


def _after(offset: int) -> Callable[[int, int], Segments]:
    def segments(first: int, count: int) -> Segments:
        yield first + offset, count

    return segments


def _heads(shape: ModelShape, kind: str) -> Callable[[int, int], Segments]:
    """Rows of q, k or v in the fused tensor."""
    each = shape.heads // shape.kv_heads  # query heads of a group
    group = (each + 2) * shape.head_dim  # rows of a group
    mine = each * shape.head_dim if kind == "q" else shape.head_dim  # rows of this kind in a group
    skip = {"q": 0, "k": each, "v": each + 1}[kind] * shape.head_dim

    def segments(first: int, count: int) -> Segments:
        while count:
            number, inside = divmod(first, mine)
            run = min(count, mine - inside)
            yield number * group + skip + inside, run
            first, count = first + run, count - run

    return segments


def heads_of(shape: ModelShape) -> Iterator[tuple[str, int, int]]:
    """("q" | "k" | "v", first row, rows) of Hugging Face's tensors, in the order in which the fused tensor has them."""
    each, dim = shape.heads // shape.kv_heads, shape.head_dim
    for group in range(shape.kv_heads):
        yield "q", group * each * dim, each * dim
        yield "k", group * dim, dim
        yield "v", group * dim, dim
