"""The decoder against transformers' Qwen2, and properties that every recipe must keep."""

import copy
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from infir2_core.config.schema import ModelShape
from infir2_core.data.batch import Batch, rows_to_batch
from infir2_core.model.decoder import Decoder
from infir2_core.ops.loss import linear_cross_entropy, one
from infir2_core.ops.reference.elementwise import (
    add_rstd,
    norm,
    norm_backward,
    rope_heads,
    rope_heads_backward,
    rope_tables,
    swiglu_backward,
    swiglu_product,
)
from infir2_core.precision.recipe import FOLDER, load_recipe, parse

SHAPES = {
    "tied-gqa": ModelShape(
        layers=2, hidden=48, ffn=80, heads=4, kv_heads=2, head_dim=12, vocab=97, tied=True, max_positions=64
    ),
    "untied-mha": ModelShape(
        layers=3, hidden=32, ffn=72, heads=2, kv_heads=2, head_dim=16, vocab=61, tied=False, max_positions=64
    ),
    "one-kv-head": ModelShape(
        layers=1,
        hidden=40,
        ffn=56,
        heads=5,
        kv_heads=1,
        head_dim=8,
        vocab=50,
        tied=False,
        rope_base=1e4,
        max_positions=64,
    ),
}
FP8 = [
    "infir2",
    "infir2-fp32-scales",
    "infir2-wgrad2d",
    "infir2-codes-shift",
    "fp8-current",
    "fp8-delayed",
    "fp8-rowwise",
    "mxfp8",
    "infir2-fp8-head",
]


def hf_twin(shape: ModelShape) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_theta": shape.rope_base, "rope_type": "default"},
        tie_word_embeddings=shape.tied,
        attn_implementation="eager",
    )
    return Qwen2ForCausalLM(config).float()


def pair(shape: ModelShape, seed: int) -> tuple[Decoder, Qwen2ForCausalLM]:
    torch.manual_seed(seed)
    ours, theirs = Decoder(shape, load_recipe("fp32")), hf_twin(shape)
    state = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, view in ours.hf_views().items():
            state[name].normal_(0.0, 0.3) if view.dim() > 1 else state[name].uniform_(-0.5, 1.5)
            view.copy_(state[name])
    return ours, theirs


def rows(shape: ModelShape, lengths: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, shape.vocab, (n + 1,), generator=generator) for n in lengths]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("lengths", [(17,), (8, 8), (5, 13, 13, 1)])
def test_logits_and_gradients_equal_transformers(name: str, lengths: tuple[int, ...]) -> None:
    shape = SHAPES[name]
    ours, theirs = pair(shape, seed=len(lengths))
    samples = rows(shape, lengths, seed=3)
    batch = rows_to_batch(samples)
    logits = ours.logits(batch)
    expected = torch.cat([theirs(row[None, :-1]).logits[0] for row in samples])
    assert (logits - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    (-ours.logprobs(batch).sum()).backward()
    torch.nn.functional.cross_entropy(expected, batch.targets_T, reduction="sum").backward()
    grads = {n: p.grad for n, p in theirs.named_parameters()}
    parameters = dict(ours.named_parameters())
    for hf_name, where in ours.hf_layout().items():
        grad = parameters[where.parameter].grad
        assert grad is not None and grads[hf_name] is not None
        mine = grad[where.start : where.stop]
        assert torch.linalg.norm(mine - grads[hf_name]) <= 1e-4 * torch.linalg.norm(grads[hf_name]), hf_name


def test_packed_rows_do_not_see_each_other() -> None:
    shape = SHAPES["tied-gqa"]
    ours, _ = pair(shape, seed=1)
    samples = rows(shape, (9, 4, 11), seed=5)
    together = ours.logprobs(rows_to_batch(samples))
    apart = torch.cat([ours.logprobs(rows_to_batch([row])) for row in samples])
    assert torch.allclose(together, apart, atol=2e-5, rtol=0)


def test_chunked_head_equals_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    from infir2_core.ops.reference import loss

    shape = SHAPES["untied-mha"]
    ours, _ = pair(shape, seed=2)
    batch = rows_to_batch(rows(shape, (19,), seed=1))
    results = []
    for elements in (1 << 28, 7 * shape.vocab):
        monkeypatch.setattr(loss, "CHUNK_ELEMENTS", elements)
        ours.zero_grad()
        out = ours.logprobs(batch)
        out.sum().backward()
        results.append((out.detach().clone(), [p.grad.clone() for p in ours.parameters() if p.grad is not None]))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_the_training_loss_is_the_weighted_sum_of_logprobs(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the form with any gradient, and with chunks whose last one is shorter."""
    from infir2_core.ops import loss as module

    model = Decoder(WIDE, load_recipe(recipe))
    model.initialise(0.05, seed=4)
    batch = rows_to_batch(rows(WIDE, (19, 8), seed=1))
    weights = torch.rand(27, generator=torch.Generator().manual_seed(0))
    weights[::5] = 0
    (-(weights * model.logprobs(batch)).sum()).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    tolerance = 1e-5 if recipe == "fp32" else 2e-2
    for size in (1 << 30, 7 * WIDE.vocab * 4):
        monkeypatch.setattr(module, "CHUNK_BYTES", size)
        model.zero_grad()
        loss, logprobs = model.loss(batch, weights)
        assert not logprobs.requires_grad
        with torch.no_grad():
            torch.testing.assert_close(logprobs, model.logprobs(batch), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(loss.detach(), -(weights * logprobs).sum())
        (0.1 * loss).backward()  # 0.1 is no bf16 number
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            difference = torch.linalg.norm(10 * parameter.grad - expected[name])
            assert difference <= tolerance * torch.linalg.norm(expected[name]), name


def test_the_upstream_gradient_scales_both_gradients_alike() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 16).bfloat16().requires_grad_(), torch.randn(24, 16).requires_grad_()
    made = []
    for factor in (1.0, 1 / 3000):
        x.grad = weight.grad = None
        loss, _ = linear_cross_entropy(x, weight, weight.detach().bfloat16(), torch.arange(8), torch.ones(8))
        (factor * loss).backward()
        made.append((x.grad.float() / factor, weight.grad / factor))
    assert torch.allclose(made[0][1], made[1][1], rtol=1e-5)
    bias = (made[1][0] / made[0][0] - 1).mean()
    assert abs(float(bias)) < 5e-4  # a factor rounded to bf16 would shift every element by 1.4e-3


def test_the_known_one_is_the_implicit_gradient() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 16).bfloat16().requires_grad_(), torch.randn(24, 16).requires_grad_()
    made = []
    for call in (lambda loss: loss.backward(), lambda loss: loss.backward(one(loss.device))):
        x.grad = weight.grad = None
        loss, _ = linear_cross_entropy(x, weight, weight.detach().bfloat16(), torch.arange(8), torch.ones(8))
        call(loss)
        made.append((x.grad, weight.grad))
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])
    loss, _ = linear_cross_entropy(x, weight, weight.detach().bfloat16(), torch.arange(8), torch.ones(8))
    x.grad = weight.grad = None
    loss.backward(one(loss.device), retain_graph=True)
    loss.backward(one(loss.device))
    assert torch.equal(weight.grad, 2 * made[0][1]), "what was kept for the second backward must be untouched"


def test_the_plan_knows_how_large_a_chunk_of_logits_is() -> None:
    from infir2_core.launch.plan import HEAD_CHUNK
    from infir2_core.ops.loss import CHUNK_BYTES

    assert HEAD_CHUNK == CHUNK_BYTES


def test_frozen_parameters_get_no_gradient() -> None:
    model = Decoder(WIDE, load_recipe("infir2"))
    model.initialise(0.05, seed=4)
    frozen = [model.get_parameter(n) for n in ("layers.0.down.weight", "layers.1.qkv.bias", "layers.1.norm1")]
    for parameter in frozen:
        parameter.requires_grad_(False)
    model.loss(rows_to_batch(rows(WIDE, (19,), seed=1)), torch.ones(19))[0].backward()
    assert all(p.grad is None for p in frozen)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


WIDE = ModelShape(
    layers=2, hidden=160, ffn=200, heads=4, kv_heads=2, head_dim=40, vocab=96, tied=True, max_positions=512
)


def gradients(recipe: str, recompute: str, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    model = Decoder(WIDE, load_recipe(recipe), recompute=recompute)
    model.initialise(0.05, seed=4)
    loss = -model.logprobs(batch).mean()
    loss.backward()
    return float(loss), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", ["bf16", "infir2", "infir2-codes-shift", "fp8-delayed"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(recipe: str, recompute: str) -> None:
    batch = rows_to_batch(rows(WIDE, (50, 50, 31), seed=8))
    loss, expected = gradients(recipe, "none", batch)
    again, found = gradients(recipe, recompute, batch)
    assert loss == again and expected.keys() == found.keys()
    assert all(torch.equal(expected[n], found[n]) for n in expected)


@pytest.mark.parametrize("recipe", FP8)
def test_fp8_gradients_point_where_bf16_ones_do(recipe: str) -> None:
    """Dimensions here divide by no block size, so padding is exercised too. E4M3 keeps four significant bits
    (relative error of a value about 2.5 %), so that a gradient, a sum of many such products, is within some per cent
    in norm."""
    batch = rows_to_batch(rows(WIDE, (70, 61), seed=9))
    loss, expected = gradients("bf16", "none", batch)
    fp8_loss, found = gradients(recipe, "none", batch)
    assert fp8_loss != loss and abs(fp8_loss - loss) < 0.02 * loss
    for name, grad in expected.items():
        assert torch.linalg.norm(found[name] - grad) < 0.25 * torch.linalg.norm(grad), name


@pytest.mark.parametrize("recipe", ["infir2", "infir2-codes-shift"])
def test_a_linear_keeps_codes_and_not_its_bf16_input(recipe: str) -> None:
    model = Decoder(WIDE, load_recipe(recipe))
    model.initialise(0.05, seed=4)
    saved: list[tuple[torch.dtype, int]] = []
    scales = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tensor.dtype, tensor.numel()))
        if tensor.dtype == torch.float32:
            scales.append(tensor.shape)
        return tensor

    x = torch.randn(64, WIDE.hidden).bfloat16().requires_grad_()
    layer = dict(model.linears())["layers.0.gate_up"]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    assert saved.count((torch.float8_e4m3fn, x.numel())) == 1, "one copy"
    assert not any(dtype == torch.bfloat16 for dtype, _ in saved)
    blocks = {"infir2": (1, WIDE.hidden), "infir2-codes-shift": (64, 2)}  # of the column copy, of the row copy
    assert scales == [blocks[recipe]]


def test_shifted_codes_of_a_rebuilt_norm_are_those_of_a_kept_one() -> None:
    text, batch = (FOLDER / "infir2-codes-shift.toml").read_text(), rows_to_batch(rows(WIDE, (70, 61), seed=9))
    made = []
    for save in ("", '\n[save]\nnorm_output = "rebuilt"\n'):
        model = Decoder(WIDE, parse(text + save, "test"))
        model.initialise(0.05, seed=4)
        (-model.logprobs(batch).mean()).backward()
        made.append([p.grad for p in model.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_the_down_projection_may_shift_the_codes_of_its_rebuilt_input() -> None:
    """The copy is that of the row copy, which no one kept; against a layer that kept it."""
    text = (FOLDER / "infir2-codes-shift.toml").read_text().replace('use = "rebuilt"', 'use = "default"')
    model = Decoder(WIDE, parse(text, "test"))
    model.initialise(0.05, seed=4)
    block, x = model.layers[0], torch.randn(2, 64, WIDE.hidden).bfloat16()
    grad = torch.randn(64, WIDE.hidden).bfloat16()
    block.feed(x[0], x[1])[1].backward(grad)
    found = block.down.weight.grad.clone()
    block.down.weight.grad = None
    total, rstd = add_rstd(x[0], x[1], WIDE.norm_eps)
    normed = norm(total, rstd, block.norm2)
    block.down(swiglu_product(block.gate_up(normed)).detach()).backward(grad)
    assert torch.equal(block.down.weight.grad, found)


@pytest.mark.parametrize("recipe", ["infir2", "fp8-delayed"])
def test_evaluation_leaves_no_trace(recipe: str) -> None:
    batch = rows_to_batch(rows(WIDE, (40,), seed=2))
    model = Decoder(WIDE, load_recipe(recipe))
    model.initialise(0.05, seed=4)
    model.logprobs(batch).sum().backward()
    before = {n: copy.deepcopy(layer.quant_state) for n, layer in model.linears()}
    with torch.no_grad():
        model.logprobs(rows_to_batch(rows(WIDE, (64,), seed=33)))
    for name, layer in model.linears():
        for operand, state in layer.quant_state.items():
            assert all(torch.equal(state[k], before[name][operand][k]) for k in state)


def test_weight_codes_follow_the_master() -> None:
    model = Decoder(WIDE, load_recipe("infir2"))
    model.initialise(0.05, seed=4)
    layer = dict(model.linears())["layers.1.o"]
    first = layer.fprop_weight()
    assert layer.fprop_weight() is first, "made once while the master does not change"
    with torch.no_grad():
        layer.weight.mul_(3.0)
    assert layer.fprop_weight() is not first
    optimizer = torch.optim.AdamW([layer.weight], lr=0.1, fused=True)
    layer.weight.grad = torch.ones_like(layer.weight)
    second = layer.fprop_weight()
    optimizer.step()
    model.end_step()
    assert layer.fprop_weight() is not second


def test_elementwise_backwards_equal_autograd() -> None:
    torch.manual_seed(0)

    def plainly(function: Any, grad: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = function(*leaves)
        out.backward(grad)
        return out, [leaf.grad for leaf in leaves if leaf.grad is not None]

    def same(*pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        assert all(torch.allclose(a, b, atol=2e-5, rtol=1e-4) for a, b in pairs)

    x, w, g, beside = torch.randn(7, 24), torch.randn(24), torch.randn(7, 24), torch.randn(7, 24)
    out, (grad_x, grad_w) = plainly(lambda x, w: torch.nn.functional.rms_norm(x, (24,), w, 1e-6), g, x, w)
    total, rstd = add_rstd(x - beside, beside, 1e-6)
    ours = norm_backward(g, total, rstd, w, beside)
    same((norm(total, rstd, w), out), (ours[0], grad_x + beside), (ours[1], grad_w))
    x, g = torch.randn(9, 24), torch.randn(9, 12)
    out, (grad_x,) = plainly(lambda x: torch.nn.functional.silu(x[:, :12]) * x[:, 12:], g, x)
    same((swiglu_product(x), out), (swiglu_backward(g, x), grad_x))
    cos, sin = rope_tables(torch.arange(6), 8, 1e4)

    def plain_rope(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)[:, None, :]
        return torch.cat([pairs.real, pairs.imag], -1)

    x, g = torch.randn(6, 3, 8), torch.randn(6, 3, 8)
    b = torch.randn(24)
    out, (grad_x, grad_b) = plainly(
        lambda x, b: torch.cat([plain_rope((x + b.view(3, 8))[:, :2]), (x + b.view(3, 8))[:, 2:]], 1), g, x, b
    )
    ours = rope_heads_backward(g, cos, sin, 2)
    same((rope_heads(x, b, cos, sin, 2), out), (ours[0], grad_x), (ours[1], grad_b))


def test_same_seed_same_weights_and_scaled_outputs() -> None:
    models = [Decoder(WIDE, load_recipe(r)) for r in ("bf16", "infir2")]
    for model in models:
        model.initialise(0.05, seed=11)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    stds = {n: float(p.std()) for n, p in models[0].named_parameters() if p.dim() > 1}
    assert stds["layers.0.qkv.weight"] == pytest.approx(0.05, rel=0.05)
    assert stds["layers.0.down.weight"] == pytest.approx(0.05 / 2, rel=0.05)
