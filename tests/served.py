"""What SGLang 0.5.14 computes for a Qwen2 FP8 folder, in plain torch with its rounding points; an oracle for tests.

Where it rounds otherwise than our training forward (read from its sources): the norm takes the float32 sum of residual
and branch, of which only the residual stream's copy is rounded; a bias is added to the GEMM's bf16 output; attention
multiplies by probabilities in bf16 that are not normalised yet, 64 keys at a time; logits are bf16. Activations are
quantised 1x128 with float32 scales, products of 128 codes are scaled and summed in float32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from infir2_core.config.hf_config import shape_from_hf
from infir2_core.config.schema import ModelShape

BLOCK, KEYS = 128, 64


def quantised(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [T, K] and the float32 scales [T, K / 128] that they are multiplied by."""
    groups = x_TK.float().unflatten(-1, (-1, BLOCK))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10)
    codes = (groups * (448 / amax)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(1), (amax * torch.tensor(1 / 448)).squeeze(-1)


def products(a_TK: Tensor, b_NK: Tensor) -> Tensor:
    """float32 [T, N] of E4M3 codes, on a GPU by the tensor cores that the server uses."""
    if not a_TK.is_cuda:
        return a_TK.float() @ b_NK.float().T
    one = torch.ones((), device=a_TK.device)
    rows = -len(a_TK) % 16
    a_TK = torch.nn.functional.pad(a_TK.view(torch.uint8), (0, 0, 0, rows)).view(a_TK.dtype)
    out = torch._scaled_mm(a_TK, b_NK.T, one, one, out_dtype=torch.float32, use_fast_accum=True)
    return out[: len(out) - rows]


def linear(x_TK: Tensor, codes_NK: Tensor, scales: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """bf16 [T, N]; the weight's scales are [N / 128, K / 128], rounded up."""
    codes, by_token = quantised(x_TK)
    rows = scales.repeat_interleave(BLOCK, 0)[: len(codes_NK)]
    total = torch.zeros(len(x_TK), len(codes_NK), device=x_TK.device)
    for k in range(by_token.shape[1]):
        part = slice(k * BLOCK, (k + 1) * BLOCK)
        made = products(codes[:, part].contiguous(), codes_NK[:, part].contiguous()) * by_token[:, k : k + 1]
        total = (made.double() * rows[:, k].double() + total).float()  # one rounding, as a fused multiply-add has
    out = total.bfloat16()
    return out if bias_N is None else out + bias_N


def norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """bf16 from float32."""
    return (x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps) * weight_D.float()).bfloat16()


def rotated(x_THd: Tensor, base: float) -> Tensor:
    """Rotary embedding with float32 tables."""
    half = x_THd.shape[-1] // 2
    inverse = 1 / base ** (torch.arange(0, 2 * half, 2, dtype=torch.float32, device=x_THd.device) / (2 * half))
    angle = torch.arange(len(x_THd), dtype=torch.float32, device=x_THd.device)[:, None, None] * inverse
    low, high = x_THd.float().chunk(2, -1)
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1).bfloat16()


def attention(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, keys: int) -> Tensor:
    """Causal, with a running maximum over blocks of `keys` keys; bf16 [T, H * d]."""
    tokens, heads, width = q_THd.shape
    q, k, v = (x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1).float() for x in (q_THd, k_TGd, v_TGd))
    top = torch.full((heads, tokens, 1), -1e20, device=q.device)
    sums, total = torch.zeros_like(top), torch.zeros_like(q)
    rows = torch.arange(tokens, device=q.device)[:, None]
    for start in range(0, tokens, keys):
        part = slice(start, start + keys)
        scores = (q @ k[:, part].transpose(1, 2)) * width**-0.5
        scores.masked_fill_(rows[:, 0][None, part] > rows, -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        kept, p = torch.exp(top - higher), torch.exp(scores - higher)
        sums = sums * kept + p.sum(-1, keepdim=True)
        total = total * kept + p.bfloat16().float() @ v[:, part]
        top = higher
    return (total / sums).transpose(0, 1).flatten(1).bfloat16()


@dataclass(frozen=True)
class Served:
    """The weights of a folder and the shape that its config.json says; attention takes `keys` keys at a time."""

    weights: dict[str, Tensor]
    shape: ModelShape
    keys: int = KEYS

    @staticmethod
    def load(folder: Path, device: str, keys: int = KEYS) -> Served:
        """Reads every safetensors file of the folder."""
        weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            weights |= load_file(file, device)
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]  # ours loads no such model to train it
        return Served(weights, shape_from_hf(config, str(folder)), keys)

    def _project(self, x: Tensor, name: str) -> Tensor:
        w = self.weights
        return linear(x, w[f"{name}.weight"], w[f"{name}.weight_scale_inv"], w.get(f"{name}.bias"))

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """bf16 [T, V] of one sequence."""
        w, s = self.weights, self.shape
        table = w["model.embed_tokens.weight"]
        total = table[torch.tensor(tokens, device=table.device)].float()
        for i in range(s.layers):
            layer = f"model.layers.{i}"
            x = norm(total, w[f"{layer}.input_layernorm.weight"], s.norm_eps)
            q, k, v = (self._project(x, f"{layer}.self_attn.{p}_proj").unflatten(-1, (-1, s.head_dim)) for p in "qkv")
            mixed = attention(rotated(q, s.rope_base), rotated(k, s.rope_base), v, self.keys)
            total = total.bfloat16().float() + self._project(mixed, f"{layer}.self_attn.o_proj").float()
            x = norm(total, w[f"{layer}.post_attention_layernorm.weight"], s.norm_eps)
            gate, up = (self._project(x, f"{layer}.mlp.{p}_proj").float() for p in ("gate", "up"))
            product = (gate / (1 + torch.exp(-gate)) * up).bfloat16()
            total = total.bfloat16().float() + self._project(product, f"{layer}.mlp.down_proj").float()
        return norm(total, w["model.norm.weight"], s.norm_eps) @ w.get("lm_head.weight", table).T
