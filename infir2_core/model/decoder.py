"""The Qwen2.5 decoder on flat batches: embedding, blocks of attention and SwiGLU, norm, head.

Tensor letters: T tokens of all packed sequences, D hidden, F feed-forward, H query heads, G key/value heads, d
head_dim, V vocabulary. q, k, v are one linear, gate and up another, so that their common input is quantised once;
`hf_layout` says which rows of which parameter carry which Hugging Face name.

Parameters are float32 masters. In a bf16 recipe every use rounds the master to bf16 first: activations, residuals and
what is exported are bf16; norms, softmax and the loss compute in float32. With a split master, matrices are bf16
parameters and the optimizer keeps what they lack; norms and biases stay float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config.schema import ModelShape
from ..data.batch import Batch
from ..ops.attention import self_attention
from ..ops.dispatch import ledger
from ..ops.loss import linear_cross_entropy
from ..ops.reference.elementwise import rope_tables
from ..ops.reference.loss import Head, float_logits, linear_logprob
from ..ops.update import Prepared
from ..precision.recipe import Policy, Recipe
from .functions import feed_forward, norm_linear, norm_of_sum, rope_qkv
from .gradients import embedding, keep_bf16, receiver
from .head import HeadWeight
from .linear import Linear, Operands

Attention = Callable[[Tensor, int, int, tuple[int, ...]], Tensor]  # as `ops.attention.self_attention`


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a parameter; the whole of it when it is not fused."""

    parameter: str
    start: int
    stop: int


class Block(nn.Module):
    """x + o(attention(norm1(x))), then x + down(swiglu(gate_up(norm2(x)))), the last sum left to the next norm."""

    def __init__(self, shape: ModelShape, recipe: Recipe, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

        def linear(role: str, inputs: int, outputs: int, bias: bool = False) -> Linear:
            policy = recipe.policy_for(f"layers.{index}.{role}", role, index, shape.layers)
            return Linear(inputs, outputs, bias, operands_of(recipe, policy), dtype, weight_dtype(recipe))

        self.norm1 = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = linear("qkv", shape.hidden, q + 2 * kv, bias=True)
        self.o = linear("o", q, shape.hidden)
        self.norm2 = nn.Parameter(torch.ones(shape.hidden))
        self.gate_up = linear("gate_up", shape.hidden, 2 * shape.ffn)
        self.gate_up.saved_output = recipe.spec(recipe.save.gate_up)
        self.qkv.rebuilt_input = self.gate_up.rebuilt_input = recipe.save.norm_output == "rebuilt"
        self.down = linear("down", shape.ffn, shape.hidden)

    def attend(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        lengths: tuple[int, ...],
        attention: Attention,
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and the attention half's contribution to it."""
        s = self.shape
        x_TD, qkv = norm_linear(x_TD, delta_TD, self.norm1, self.qkv, s.norm_eps)
        assert self.qkv.bias is not None
        heads = rope_qkv(qkv, self.qkv.bias, cos, sin, s.head_dim, s.heads + s.kv_heads)
        out = attention(heads, s.heads, s.kv_heads, lengths)
        return x_TD, self.o(out.reshape(-1, s.heads * s.head_dim))

    def feed(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and the feed-forward half's contribution to it."""
        return feed_forward(x_TD, delta_TD, self.norm2, self.gate_up, self.down, self.shape.norm_eps)

    def forward(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        lengths: tuple[int, ...],
        recompute: str,
        attention: Attention = self_attention,
    ) -> tuple[Tensor, Tensor]:
        """One block; residual stream and what is still to be added to it, in and out.

        `recompute = "selective"` rebuilds the feed-forward half, the larger part of what is saved.
        """
        x_TD, delta_TD = self.attend(x_TD, delta_TD, cos, sin, lengths, attention)
        if recompute == "selective" and torch.is_grad_enabled():
            return _again(self.feed, x_TD, delta_TD)
        return self.feed(x_TD, delta_TD)


class Decoder(nn.Module):
    """A Qwen2.5-family language model built from a shape and a recipe.

    Args:
        shape: architecture.
        recipe: which operands are quantised, and the compute dtype.
        device: where parameters live.
        recompute: `none`, `selective` (feed-forward halves) or `full` (whole blocks) are rebuilt in backward.
    """

    def __init__(self, shape: ModelShape, recipe: Recipe, device: str = "cpu", recompute: str = "none") -> None:
        super().__init__()
        self.shape, self.recipe, self.recompute = shape, recipe, recompute
        self.dtype = torch.bfloat16 if recipe.compute == "bf16" else torch.float32
        with torch.device(device):
            self.embed = nn.Parameter(torch.empty(shape.vocab, shape.hidden, dtype=weight_dtype(recipe)))
            self.layers = nn.ModuleList(Block(shape, recipe, i, self.dtype) for i in range(shape.layers))
            self.norm = nn.Parameter(torch.ones(shape.hidden))
            self.head = None if shape.tied else nn.Parameter(torch.empty_like(self.embed))
            self.lm_head = HeadWeight(operands_of(recipe, recipe.policy_for("head", "head")), self.dtype)
            counting: list[Linear | HeadWeight] = [*(layer for _, layer in self.linears()), self.lm_head]
            self.nonfinite_values = torch.zeros(len(counting), dtype=torch.int64)  # of each; read as one tensor
        for layer, counter in zip(counting, self.nonfinite_values, strict=True):
            layer.nonfinite_values = counter
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and recipe.optimizer.main_grad == "bf16":
                keep_bf16(name, parameter)
            elif parameter.dtype != torch.float32:
                parameter.grad_dtype = torch.float32

    def hidden(self, batch: Batch, attentions: Sequence[Attention] | None = None) -> Tensor:
        """Final normed hidden states, [T, D] in the compute dtype; `attentions`: of each block, for generation."""
        cos, sin = rope_tables(batch.positions_T, self.shape.head_dim, self.shape.rope_base)
        x = embedding(batch.tokens_T, self.embed, self.dtype)
        delta = None
        for block, attention in zip(self.layers, attentions or [self_attention] * len(self.layers), strict=True):
            if self.recompute == "full" and torch.is_grad_enabled():
                x, delta = _again(block, x, delta, cos, sin, batch.lengths, "none")
            else:
                x, delta = block(x, delta, cos, sin, batch.lengths, self.recompute, attention)
        return norm_of_sum(x, delta, self.norm, self.shape.norm_eps)

    def logits(self, batch: Batch) -> Tensor:
        """float32 [T, V]; for tests, training uses `loss`."""
        return float_logits(self.hidden(batch), self.reading_head())

    def reading_head(self) -> Head:
        """The head of forwards without backward, for any number of `float_logits` with these weights."""
        head = self.lm_head.read(self._head_weight(), training=False)
        if isinstance(head, Tensor) and head.device.type == "cpu":
            head = head.float()  # as float_logits computes there; rounding has happened
        return Head.of(head)

    def logprobs(self, batch: Batch) -> Tensor:
        """log p(target) of each token, float32 [T], from float32 logits; gradients flow."""
        weight = self._head_weight()
        hidden, head = self.hidden(batch), self.lm_head.read(weight, torch.is_grad_enabled())
        if isinstance(head, Tensor):
            ledger.add("head", hidden, head, "torch")
        return linear_logprob(hidden, receiver(weight), head, batch.targets_T)

    def loss(self, batch: Batch, weights_T: Tensor) -> tuple[Tensor, Tensor]:
        """-sum(weights * log p(target)), for training; and the log-probabilities, float32 [T], without gradient."""
        weight = self._head_weight()
        hidden, head = self.hidden(batch), self.lm_head.read(weight, training=True)
        if isinstance(head, Tensor):  # a quantised one counts its own
            ledger.add("head", hidden, head, "torch")
        return linear_cross_entropy(hidden, receiver(weight), head, batch.targets_T, weights_T)

    def _head_weight(self) -> nn.Parameter:
        return self.embed if self.head is None else self.head

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Every precision-aware linear with its dotted name."""
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                yield name, module

    def quantiser_tensors(self) -> dict[str, Tensor]:
        """State of quantisers that remember earlier steps, live, under the names that checkpoints give it."""
        return {
            f"quant/{name}.{operand}.{key}": tensor
            for name, layer in self.linears()
            for operand, state in layer.quant_state.items()
            for key, tensor in state.items()
        }

    def refillable(self) -> dict[str, Prepared]:
        """Parameter name -> prepared weight that an optimizer may overwrite together with its master."""
        found = {f"{name}.weight": layer.refillable() for name, layer in self.linears()}
        return {name: prepared for name, prepared in found.items() if prepared is not None}

    def end_step(self, refilled: Collection[str] = ()) -> None:
        """To be called after each optimizer step: quantiser histories move on.

        `refilled` names parameters whose prepared weight was overwritten.
        """
        for name, layer in self.linears():
            layer.end_step(f"{name}.weight" in refilled)
        self.lm_head.drop_codes()

    @torch.no_grad()
    def initialise(self, std: float, seed: int) -> None:
        """Random weights as Megatron-LM draws them: N(0, std), outputs into the residual N(0, std / sqrt(2 layers)).

        Drawn on the CPU, so that a seed gives the same model on every device. Norms are 1, biases 0.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            out = name.endswith(("o.weight", "down.weight"))
            scale = std / math.sqrt(2 * self.shape.layers) if out else std
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    def hf_layout(self) -> dict[str, Rows]:
        """Hugging Face tensor name -> the rows of our parameter that hold it. A tied head has no name of its own."""
        s = self.shape
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        layout = {"model.embed_tokens.weight": Rows("embed", 0, s.vocab)}
        for i in range(s.layers):
            ours, theirs = f"layers.{i}", f"model.layers.{i}"
            borders = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
            for name, (start, stop) in borders.items():
                layout[f"{theirs}.self_attn.{name}.weight"] = Rows(f"{ours}.qkv.weight", start, stop)
                layout[f"{theirs}.self_attn.{name}.bias"] = Rows(f"{ours}.qkv.bias", start, stop)
            layout[f"{theirs}.self_attn.o_proj.weight"] = Rows(f"{ours}.o.weight", 0, s.hidden)
            layout[f"{theirs}.mlp.gate_proj.weight"] = Rows(f"{ours}.gate_up.weight", 0, s.ffn)
            layout[f"{theirs}.mlp.up_proj.weight"] = Rows(f"{ours}.gate_up.weight", s.ffn, 2 * s.ffn)
            layout[f"{theirs}.mlp.down_proj.weight"] = Rows(f"{ours}.down.weight", 0, s.hidden)
            layout[f"{theirs}.input_layernorm.weight"] = Rows(f"{ours}.norm1", 0, s.hidden)
            layout[f"{theirs}.post_attention_layernorm.weight"] = Rows(f"{ours}.norm2", 0, s.hidden)
        layout["model.norm.weight"] = Rows("norm", 0, s.hidden)
        if not s.tied:
            layout["lm_head.weight"] = Rows("head", 0, s.vocab)
        return layout

    def hf_views(self) -> dict[str, Tensor]:
        """Hugging Face name -> view of the weight: float32 master, or bf16 where masters are split."""
        parameters = dict(self.named_parameters())
        return {name: parameters[r.parameter].detach()[r.start : r.stop] for name, r in self.hf_layout().items()}


def weight_dtype(recipe: Recipe) -> torch.dtype:
    """What matrices of the model are kept in: bfloat16 when the optimizer splits its masters."""
    return torch.bfloat16 if recipe.optimizer.master == "split" else torch.float32


def operands_of(recipe: Recipe, policy: Policy) -> Operands:
    """Resolves the spec names of a policy."""
    return Operands(**{key.replace(".", "_"): recipe.spec(name) for key, name in policy.operands().items()})


def _again(function: object, *args: object) -> tuple[Tensor, Tensor]:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return, arg-type]
