"""The weights of a torch_dist checkpoint under their Hugging Face names: names, groupings and padding undone.

The architecture comes from the checkpoint's own `args`; what they do not say comes from the origin's config.json.
Optimizer state, random states and FP8 extra state are passed over. A checkpoint of FP8 parameters holds float32
masters beside dequantised weights; the masters are the weights then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config.presets import list_presets
from ...config.schema import ModelShape
from ...errors import InputError
from ..folder import FLOATS, tensor_shapes
from ..streams import check_finite
from ..weights import Layout
from .arguments import PADDING, check_model, read_count, read_number
from .dist import DistCheckpoint, find_iteration
from .names import EMBEDDING, FC1, FC2, HEAD, LAYER, PROJ, QKV, places

MULTIPLE = 128  # to which Megatron pads
MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")
_PASSED_OVER = ("optimizer.", "rng_state", "rerun_state", "common_state", "chained_", "opt_param_scheduler")


class MegatronWeights:
    """As `Weights`, for an iteration folder or a folder of iterations.

    Args:
        origin: architecture of the model that training began with; None: as `args` say.

    Raises:
        InputError: no such checkpoint, a damaged one, a model that is no Qwen2.5, or an origin that contradicts it.
    """

    kind = "megatron"

    def __init__(self, folder: Path, where: str, origin: ModelShape | None = None) -> None:
        self.path = find_iteration(folder, where)
        self.checkpoint = DistCheckpoint(self.path)
        self.notes: list[str] = []
        stored = {name for name in self.checkpoint.tensors if not name.startswith(_PASSED_OVER)}
        self._prefix = ""  # some writers keep the model below a name of its own
        if not any(name == EMBEDDING for name in stored):
            self._prefix = next((n.removesuffix(EMBEDDING) for n in sorted(stored) if n.endswith(EMBEDDING)), "")
        self._stored = {name.removeprefix(self._prefix): name for name in stored if name.startswith(self._prefix)}
        self._masters = self._master_names()
        self.shape = self._shape(origin)
        self._places = self._find()
        wanted = tensor_shapes(self.shape)
        self.tensors: Layout = {
            name: (self.checkpoint.tensors[key].dtype, wanted[name]) for name, (key, *_) in self._places.items()
        }

    @property
    def iteration(self) -> int | None:
        """Training iterations done; None when the checkpoint does not say."""
        found = self.checkpoint.common.get("iteration", self.checkpoint.arguments.get("iteration"))
        return found if isinstance(found, int) else None

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """As `Weights.rows`."""
        key, layer, segments = self._places[name]
        parts = [self.checkpoint.rows(key, layer, start, run) for start, run in segments(first, count)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        check_finite(rows, name, str(self.path), first)
        return rows

    def identity(self) -> dict[str, Any]:
        """Size and time of change of each file."""
        status = {path.name: path.stat() for path in sorted(self.path.iterdir()) if path.is_file()}
        return {name: [found.st_size, found.st_mtime_ns] for name, found in status.items()}

    def close(self) -> None:
        """As `Weights.close`."""
        self.checkpoint.close()

    def _size(self, name: str) -> tuple[int, ...]:
        key = self._key((name,), 0 if LAYER.fullmatch(name) is None and name not in (EMBEDDING, HEAD) else None)
        if key is None:
            what = f"the checkpoint has no weight '{name}'"
            objects = [found for found in self.checkpoint.objects if name in found and "_extra_state" not in found]
            if objects:
                what += f": '{objects[0]}' is stored as an object, which is not read"
            raise InputError(what, str(self.path), "only Qwen2.5-family models are converted")
        shape = self.checkpoint.tensors[key[0]].shape
        return shape if key[1] is None else shape[1:]

    def _matrix(self, name: str) -> tuple[int, int]:
        """The extents of a weight that has two."""
        shape = self._size(name)
        if len(shape) != 2:
            what = f"the weight '{name}' has size {list(shape)}, expected two dimensions"
            raise InputError(what, str(self.path), "only Qwen2.5-family models are converted")
        return shape[0], shape[1]

    def _key(self, names: tuple[str, ...], layer: int | None) -> tuple[str, int | None] | None:
        """(tensor of the checkpoint, index along its leading axis) that holds one of `names` of a layer."""
        for name in names:
            for full, index in ((f"decoder.layers.{name}", layer), (f"decoder.layers.{layer}.{name}", None)):
                full = name if layer is None else full
                if full in self._stored:
                    return self._masters.get(full, self._stored[full]), index
        return None

    def _master_names(self) -> dict[str, str]:
        """Weight -> its float32 master, when the weights of the checkpoint are dequantised FP8 parameters."""
        arguments, held = self.checkpoint.arguments, self.checkpoint.tensors
        if not (arguments.get("fp8_param_gather") or arguments.get("fp8_param")):
            return {}
        found = {}
        for name, full in self._stored.items():
            master = next((prefix + full for prefix in MASTERS if prefix + full in held), None)
            if master and held[master].shape == held[full].shape:
                found[name] = master
        if len(found) == len(self._stored):
            self.notes.append("weights come from the optimizer's float32 masters: the others are dequantised FP8")
            return found
        self.notes.append("the weights are dequantised FP8 parameters; the checkpoint has no whole set of masters")
        return {}

    def _shape(self, origin: ModelShape | None) -> ModelShape:
        arguments = self.checkpoint.arguments
        check_model(arguments, self.path)
        padded, hidden = self._matrix(EMBEDDING)
        fused, attention = self._matrix(f"{QKV}.weight")[0], self._matrix(f"{PROJ}.weight")[1]
        layers = self._count_layers()
        found: dict[str, Any] = {"layers": layers, "hidden": hidden, "ffn": self._matrix(f"{FC2}.weight")[1]}
        found["tied"] = HEAD not in self._stored
        if found["tied"] and arguments.get("untie_embeddings_and_output_weights") is True:
            what = f"untie_embeddings_and_output_weights = True, but the checkpoint has no weight '{HEAD}'"
            raise InputError(what, str(self.path), "copy the checkpoint again")
        heads = read_count(arguments, "num_attention_heads", self.path) or (origin.heads if origin else None)
        if not heads:
            what = "the checkpoint has no args, so the number of heads is not known"
            raise InputError(what, str(self.path), "--origin HF_DIR of the model that training began with")
        found |= self._heads(heads, fused, attention)
        rope_base, norm_eps = (read_number(arguments, name, self.path) for name in ("rotary_base", "norm_epsilon"))
        found["rope_base"] = rope_base or (origin.rope_base if origin else 10000.0)
        found["norm_eps"] = norm_eps or (origin.norm_eps if origin else 1e-6)
        positions = read_count(arguments, "max_position_embeddings", self.path)
        positions = origin.max_positions if origin else positions
        found |= {"max_positions": positions or 32768, "vocab": self._vocabulary(padded, found, origin)}
        try:
            shape = ModelShape(**found)
        except ValueError as error:
            what = f"its tensors make no model: {error}"
            raise InputError(what, str(self.path), "only Qwen2.5-family models are converted") from error
        if origin and (different := [n for n in ModelShape.model_fields if getattr(origin, n) != getattr(shape, n)]):
            name = different[0]
            what = f"the origin says {name} = {getattr(origin, name)}, the checkpoint {getattr(shape, name)}"
            raise InputError(what, str(self.path), "give the model that training began with")
        return shape

    def _heads(self, heads: int, fused: int, attention: int) -> dict[str, int]:
        """Query and key/value heads and their length, of the fused qkv weight's and the projection's extents."""
        head_dim = attention // heads
        kv_heads = (fused // head_dim - heads) // 2 if head_dim else 0
        explained = head_dim * heads == attention and (heads + 2 * kv_heads) * head_dim == fused
        if not explained or kv_heads < 1 or heads % kv_heads or head_dim % 2:
            what = f"the fused qkv weight has {fused} rows and the projection {attention} columns, which "
            hint = "num_attention_heads in the checkpoint's args, or --origin, is of another model"
            raise InputError(what + f"{heads} heads (num_attention_heads) do not explain", str(self.path), hint)
        found = {"heads": heads, "head_dim": head_dim, "kv_heads": kv_heads}
        names = {"kv_channels": "head_dim", "num_query_groups": "kv_heads"}
        if not self.checkpoint.arguments.get("group_query_attention"):
            del names["num_query_groups"]  # Megatron passes over it then
        for name, ours in names.items():
            said = read_count(self.checkpoint.arguments, name, self.path)
            if said is not None and said != found[ours]:
                what = f"the args say {name} = {said}, the weights have {found[ours]} with {heads} heads"
                raise InputError(what, str(self.path), "copy the checkpoint again")
        return found

    def _vocabulary(self, padded: int, found: dict[str, Any], origin: ModelShape | None) -> int:
        """Rows of the embedding without Megatron's padding."""
        if origin:
            if origin.vocab > padded:
                what = f"the origin has {origin.vocab} words, the checkpoint's embedding only {padded} rows"
                raise InputError(what, str(self.path), "give the model that training began with")
            return origin.vocab
        said = read_count(self.checkpoint.arguments, "vocab_size", self.path)
        divisible = read_count(self.checkpoint.arguments, "make_vocab_size_divisible_by", self.path) or 0
        tp = read_count(self.checkpoint.arguments, "tensor_model_parallel_size", self.path) or 1
        padding = max(PADDING, divisible * tp)
        for preset in list_presets():
            vocab = preset.model.vocab
            same = all(getattr(preset.model, key) == found[key] for key in ("layers", "hidden", "ffn", "heads"))
            # some scripts call a padded size the vocabulary, and some the words of the tokenizer
            loose = said is None or said <= vocab or (said % MULTIPLE == 0 and said - vocab < padding)
            if same and loose and 0 <= padded - vocab < padding:
                self.notes.append(f"vocabulary {vocab}, as preset {preset.size} has it (padded: {padded})")
                return vocab
        if said is not None and said <= padded:
            self.notes.append(f"vocabulary {said}, as vocab_size in the args says (padded: {padded})")
            return said
        self.notes.append(f"nothing says how many of the {padded} words are padding: all are kept (--origin says)")
        return padded

    def _count_layers(self) -> int:
        numbers = {int(m[1]) for m in map(LAYER.fullmatch, self._stored) if m and m[1] is not None}
        if numbers:
            return max(numbers) + 1
        name = f"decoder.layers.{FC2}.weight"
        if name not in self._stored:
            what = f"the checkpoint has no weight '{name}'"
            raise InputError(what, str(self.path), "only Qwen2.5-family models are converted")
        return self.checkpoint.tensors[self._stored[name]].shape[0]

    def _find(self) -> dict[str, tuple[str, int | None, Any]]:
        split = any(name.endswith(f"{FC1}.weight_w") for name in self._stored)
        found: dict[str, tuple[str, int | None, Any]] = {}
        for name, place in places(self.shape, split).items():
            key = self._key(place.names, place.layer)
            if key is None:
                missing = place.names[0] if place.layer is None else f"layer {place.layer}, {place.names[0]}"
                raise InputError(f"the checkpoint has no weight for '{name}' ({missing})", str(self.path))
            dtype = self.checkpoint.tensors[key[0]].dtype
            if dtype not in FLOATS:
                what = f"the weight '{key[0]}' has dtype {dtype}, expected bf16, fp16 or fp32"
                raise InputError(what, str(self.path), "save the checkpoint with its weights in bf16 or fp32")
            found[name] = (*key, place.segments)
        used = {key for key, *_ in found.values()}
        for name, full in sorted(self._stored.items()):
            if self._masters.get(name, full) not in used and not name.endswith("_extra_state"):
                what = f"the weight '{name}' has no place in a Qwen2.5 model"
                raise InputError(what, str(self.path), "only Qwen2.5-family models are converted")
        return found
