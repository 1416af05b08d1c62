"""torch_dist checkpoints that megatron-core and TransformerEngine write on GPUs, converted, against Megatron's logits.

Run with one and with two GPUs: `pytest tests/gpu/test_megatron_gpu.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

PROGRAM = """
import argparse, json, os, pathlib, sys, torch, torch.distributed as dist, torch.nn.functional as F
from megatron.core import dist_checkpointing as dc, parallel_state as ps, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

def case(rank, tp, fp8, tied, folder):
    quantised = dict(fp8="e4m3", fp8_recipe="blockwise") if fp8 else {}
    config = TransformerConfig(
        num_layers=3, hidden_size=512, ffn_hidden_size=1024, num_attention_heads=4, num_query_groups=2,
        kv_channels=128, add_bias_linear=False, add_qkv_bias=True, gated_linear_unit=True, activation_func=F.silu,
        normalization="RMSNorm", layernorm_epsilon=1e-6, hidden_dropout=0.0, attention_dropout=0.0, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=tp,
        init_method_std=0.05, **quantised)
    model = GPTModel(
        config, get_gpt_layer_with_transformer_engine_spec(), vocab_size=640, max_sequence_length=128,
        parallel_output=False, position_embedding_type="rope", rotary_base=1000000,
        share_embeddings_and_output_weights=tied).cuda()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model = Float16Module(config, model)
    ids = (torch.arange(128, device="cuda")[None] * 7) % 600
    positions = torch.arange(128, device="cuda")[None]
    with torch.no_grad():
        logits = model(ids, positions, None)[0, :, :600].float().cpu()
    out = folder / "iter_0000001"
    if rank == 0:
        out.mkdir(parents=True)
    dist.barrier()
    args = argparse.Namespace(num_attention_heads=4, rotary_base=1000000, norm_epsilon=1e-6, vocab_size=600,
                              max_position_embeddings=128, fp8="e4m3" if fp8 else None, fp8_recipe="blockwise",
                              bf16=True)
    dc.save({"model": model.module.sharded_state_dict(), "args": args, "iteration": 1}, str(out))
    dist.barrier()
    if rank == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("1")
        torch.save(logits, folder / "logits")

def main():
    rank, tp, out = int(os.environ["LOCAL_RANK"]), int(sys.argv[1]), pathlib.Path(sys.argv[2])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    ps.initialize_model_parallel(tp, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for fp8 in (False, True):
        for tied in (False, True):
            case(rank, tp, fp8, tied, out / f"fp8-{fp8}-tied-{tied}")
    dist.destroy_process_group()

if __name__ == "__main__":  # the processes that write a checkpoint import this file
    main()
"""


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, each with the logits of the model that wrote it."""
    pytest.importorskip("transformer_engine")
    tp = request.param
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    folder = tmp_path_factory.mktemp(f"tp{tp}")
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={tp}", "--master-port=29533"]
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [*command, str(folder / "program.py"), str(tp), str(folder)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_the_converted_model_equal_megatrons(tmp_path: Path, written: Path, fp8: bool, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    from infir2_core.convert.export import export_hf
    from infir2_core.convert.weights import open_weights
    from infir2_core.data.batch import rows_to_batch
    from infir2_core.model.decoder import Decoder
    from infir2_core.model.hf import load_hf
    from infir2_core.precision.recipe import load_recipe

    folder = written / f"fp8-{fp8}-tied-{tied}"
    weights = open_weights(folder, "A")
    assert weights.shape.vocab == 600 and weights.shape.layers == 3
    export_hf(weights, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).cuda()
    with torch.no_grad():
        ours = model(((torch.arange(128, device="cuda") * 7) % 600)[None]).logits[0].float().cpu()
        exact = model.float()(((torch.arange(128, device="cuda") * 7) % 600)[None]).logits[0].cpu()
    theirs = torch.load(folder / "logits", weights_only=True)
    error = float((theirs - exact).norm() / exact.norm())
    if not fp8:
        noise = float((ours - exact).norm() / exact.norm())  # what bf16 arithmetic costs
        assert error < 3 * noise
        return
    # Megatron's forward quantises: it must be as far from bf16 as ours is with the same weights and rules.
    decoder = Decoder(weights.shape, load_recipe("infir2"), "cuda")
    load_hf(decoder, tmp_path / "hf")
    with torch.no_grad():
        quantised = decoder.logits(rows_to_batch([(torch.arange(129) * 7) % 600]).to("cuda")).cpu()
    expected = float((quantised - exact).norm() / exact.norm())
    print(f"{written.name} tied {tied}: {error:.4f} of the logits' norm from bf16, our forward {expected:.4f}")
    assert 0.75 * expected < error < 1.25 * expected
