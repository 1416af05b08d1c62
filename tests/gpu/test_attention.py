"""Attention on the GPU against float32 arithmetic, whichever implementation is installed."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from infir2_core.ops import attention as ours
from infir2_core.ops.reference.attention import attention

pytestmark = pytest.mark.gpu
SHAPES = {"grouped": (12, 2, 128), "narrow": (14, 2, 64), "plain": (4, 4, 128)}
PACKS = [(256, 256), (300,), (128, 64, 1, 255), (17, 17, 17)]


def make(shape: str, lengths: tuple[int, ...]) -> torch.Tensor:
    heads, kv, width = SHAPES[shape]
    generator = torch.Generator().manual_seed(sum(lengths))
    return torch.randn(sum(lengths), heads + 2 * kv, width, generator=generator).bfloat16().cuda().requires_grad_()


def run(x: torch.Tensor, shape: str, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    heads, kv, width = SHAPES[shape]
    out = ours.self_attention(x, heads, kv, lengths)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(x.shape[0], heads, width, generator=generator).bfloat16().cuda()
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


def exact(x: torch.Tensor, shape: str, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32 on the CPU, one sequence after the other."""
    heads, kv, width = SHAPES[shape]
    leaf = x.detach().float().cpu().requires_grad_()
    pieces = [attention(*part.split([heads, kv, kv], 1), (len(part),)) for part in leaf.split(lengths)]
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(x.shape[0], heads, width, generator=generator).bfloat16().float()
    out = torch.cat(pieces)
    return out.detach(), torch.autograd.grad(out, leaf, grad)[0]


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.linalg.norm(a.float().cpu() - b) / torch.linalg.norm(b))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("implementation", ["flash-attn-4", "sdpa"])
def test_output_and_gradients(
    shape: str, lengths: tuple[int, ...], implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make(shape, lengths)
    if implementation == "sdpa":
        monkeypatch.setattr(ours, "_flash_imports", lambda: False)
    elif ours.implementation(x) != implementation:
        pytest.skip("flash-attn-4 is not installed")
    for mine, theirs in zip(run(x, shape, lengths), exact(x, shape, lengths), strict=True):
        assert error(mine, theirs) < 8e-3  # bf16 probabilities and outputs: two roundings of 2**-9 each, and their sums


def test_packed_rows_are_those_alone() -> None:
    """Also a batch of equal lengths takes another path than a pack."""
    lengths = (256, 128, 256)
    x = make("grouped", lengths)
    packed, _ = run(x, "grouped", lengths)
    alone = torch.cat([ours.self_attention(part, 12, 2, (len(part),)) for part in x.detach().split(lengths)])
    if ours.implementation(x) == "flash-attn-4":
        assert torch.equal(packed, alone)
    else:
        assert error(packed, alone.float().cpu()) < 4e-3


def test_deterministic_mode_repeats_bit_for_bit() -> None:
    x = make("grouped", (512, 512))
    if ours.implementation(x) != "flash-attn-4":
        pytest.skip("flash-attn-4 is not installed")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first = run(x, "grouped", (512, 512))[1]
        assert all(torch.equal(first, run(x, "grouped", (512, 512))[1]) for _ in range(3))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("sharpness", [1.0, 3.0])
@pytest.mark.parametrize("implementation", ["flash-attn-4", "sdpa"])
def test_long_sequences(sharpness: float, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 8,192 tokens, as the bench trains on them; with sharp scores a query sees few keys."""
    lengths, (heads, kv, _) = (8192, 8192), SHAPES["grouped"]
    with torch.no_grad():
        x = make("grouped", lengths)
        x[:, : heads + kv] *= sharpness
    if implementation == "sdpa":
        monkeypatch.setattr(ours, "_flash_imports", lambda: False)
    elif ours.implementation(x) != implementation:
        pytest.skip("flash-attn-4 is not installed")
    out, grad = run(x, "grouped", lengths)
    given = torch.randn(x.shape[0], heads, 128, generator=torch.Generator().manual_seed(1)).bfloat16().float().cuda()
    for row in range(2):
        part = slice(8192 * row, 8192 * (row + 1))
        leaf = x.detach()[part].float().requires_grad_()
        q, k, v = (t.transpose(0, 1) for t in leaf.split([heads, kv, kv], 1))
        k, v = (t.repeat_interleave(heads // kv, 0) for t in (k, v))
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            exactly = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1)
        wanted = torch.autograd.grad(exactly, leaf, given[part])[0]
        assert error(out[part], exactly.detach().cpu()) < 8e-3
        for first, last in ((0, heads), (heads, heads + kv), (heads + kv, heads + 2 * kv)):
            assert error(grad[part, first:last], wanted[:, first:last].cpu()) < 1.2e-2
