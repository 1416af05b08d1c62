"""The peer's model as far as it can be built without a GPU: which linears accumulate their weight gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infir2_core.bench import peer

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
import megatron_cpu
from infir2_core.bench.peer import fused_where_possible

megatron_cpu.shims()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import layers

ps.initialize_model_parallel(1, 1)
options = megatron_cpu.DEFAULTS | {"fused": True}
try:
    megatron_cpu.build(options)
except RuntimeError as error:
    assert "APEX" in str(error)
else:
    raise AssertionError("megatron-core builds without Apex: nothing has to be told to its linears")
model = fused_where_possible(lambda: megatron_cpu.build(options))
assert model.config.gradient_accumulation_fusion, "TransformerEngine's linears read it from here"
assert layers._grad_accum_fusion_available is False
for parameter in model.parameters():
    parameter.main_grad = torch.zeros_like(parameter)
    torch.nn.init.normal_(parameter, std=0.02)
ids = torch.arange(12)[None]
mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
model(ids, ids, mask).square().mean().backward()  # fused, this would call the extension that is not there
weights = {name: p for name, p in model.named_parameters() if p.dim() == 2}
assert "output_layer.weight" in weights and len(weights) == 10
assert all(p.grad.abs().sum() > 0 and not p.main_grad.any() for p in weights.values())
"""


def test_the_head_is_built_without_apex_and_leaves_its_gradient_to_autograd(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    if torch.cuda.is_available():
        pytest.skip("megatron-core runs here on a GPU")
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1]), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Linear(torch.nn.Module):
    """What TransformerEngine's linears show of their accumulation."""

    def __init__(self, fused: bool, added: bool) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fused
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.weight.grad_added_to_main_grad = added  # type: ignore[attr-defined]


def test_a_linear_that_did_not_accumulate_is_an_error() -> None:
    peer.check_fused(torch.nn.ModuleDict({"qkv": Linear(True, True), "head": Linear(False, False)}))
    with pytest.raises(RuntimeError, match="1 of 2 linears did not, fc1 among them"):
        peer.check_fused(torch.nn.ModuleDict({"qkv": Linear(True, True), "fc1": Linear(True, False)}))
    with pytest.raises(RuntimeError, match="no linear does"):
        peer.check_fused(torch.nn.ModuleDict({"qkv": Linear(False, False)}))
