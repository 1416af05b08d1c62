"""What an FP8 LM head costs in accuracy, by reference on a CPU: python benchmarks/head_accuracy.py

Relative errors of the loss and of both gradients, of a bf16 head and of that of `infir2-fp8-head`, against float32 with
the same bf16 hidden states and weight. Targets follow Zipf's law. Untrained hidden states are random rows of norm
sqrt(D) with some channels ten times larger; `trained` ones lean towards the weight of their target and towards a
direction that carries word frequencies, until the loss is what is asked for. Nothing is learnt.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from infir2_core.model.decoder import operands_of
from infir2_core.model.head import HeadWeight
from infir2_core.ops.loss import linear_cross_entropy
from infir2_core.precision.recipe import load_recipe


def case(tokens: int, vocab: int, hidden: int, loss: float | None, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, D] and weight [V, D], float32 holding bf16 values, and targets [T]; `loss` None: untrained."""
    generator = torch.Generator().manual_seed(seed)
    frequency = 1 / torch.arange(1, vocab + 1).float()
    targets = torch.multinomial(frequency, tokens, replacement=True, generator=generator)
    weight = 0.02 * torch.randn(vocab, hidden, generator=generator)
    x = torch.randn(tokens, hidden, generator=generator)
    x[:, :: hidden // 8] *= 10
    if loss is not None:
        common = torch.randn(hidden, generator=generator) / hidden**0.5
        weight += 0.2 * (frequency.log() - frequency.log().mean())[:, None] / hidden**0.5 * common

        def towards(amount: float) -> Tensor:
            own = weight[targets] / weight[targets].norm(dim=1, keepdim=True)
            mixed = 0.05 * x + amount * (own + common)
            return mixed * (hidden**0.5 / mixed.norm(dim=1, keepdim=True)) * (1 + amount)

        low, high = 0.0, 20.0
        for _ in range(12):  # the loss falls with the amount
            middle = (low + high) / 2
            here = nn.functional.cross_entropy(towards(middle)[:512] @ weight.T, targets[:512])
            low, high = (middle, high) if here > loss else (low, middle)
        x = towards(high)
    else:
        x *= hidden**0.5 / x.norm(dim=1, keepdim=True)
    return x.bfloat16().float(), weight.bfloat16().float(), targets


def gradients(x: Tensor, weight: Tensor, targets: Tensor, kind: str) -> tuple[float, Tensor, Tensor]:
    """Mean loss, its gradients of the hidden states and of the weight, by a head of the recipe `kind`."""
    recipe = load_recipe(kind)
    dtype = torch.float32 if recipe.compute == "fp32" else torch.bfloat16
    parameter, leaf = nn.Parameter(weight.clone()), x.detach().clone().to(dtype).requires_grad_()
    head: Any = HeadWeight(operands_of(recipe, recipe.policy_for("head", "head")), dtype).read(parameter, True)
    total, _ = linear_cross_entropy(leaf, parameter, head, targets, torch.full((len(x),), 1 / len(x)))
    total.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None and parameter.grad is not None
    return float(total.detach()), leaf.grad.float(), parameter.grad


def error(made: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float(torch.linalg.norm(made - truth) / torch.linalg.norm(truth))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=512)
    given = parser.parse_args()
    for name, loss in (("untrained", None), ("trained", 6.0), ("trained", 3.0), ("trained", 1.0)):
        x, weight, targets = case(given.tokens, given.vocab, given.hidden, loss)
        truth = gradients(x, weight, targets, "fp32")
        made = {kind: gradients(x, weight, targets, kind) for kind in ("bf16", "infir2-fp8-head")}
        used = torch.zeros(given.vocab, dtype=torch.bool).index_fill_(0, targets, True)
        print(f"{name}: loss {truth[0]:.4f}, {int(used.sum())} of {given.vocab} words are targets")
        for kind, (value, grad_x, grad_weight) in made.items():
            print(
                f"  {kind:16} loss {value / truth[0] - 1:+.2e}  hidden {error(grad_x, truth[1]):.4f}  "
                f"weight {error(grad_weight, truth[2]):.4f} (targets {error(grad_weight[used], truth[2][used]):.4f}, "
                f"others {error(grad_weight[~used], truth[2][~used]):.4f})"
            )
        fp8, bf16 = made["infir2-fp8-head"], made["bf16"]
        print(f"  fp8 against bf16 loss {fp8[0] / bf16[0] - 1:+.2e}  hidden {error(fp8[1], bf16[1]):.4f}  "
              f"weight {error(fp8[2], bf16[2]):.4f}")  # fmt: skip


if __name__ == "__main__":
    main()
