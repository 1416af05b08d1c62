"""Writes torch_dist checkpoints with megatron-core itself, on a CPU over gloo; run as a program, one process a rank.

    python megatron_cpu.py '[{"out": "...", "logits": "...", "tp": 2}, ...]'

Also writes the logits of the model, which is random, or read from the torch_dist checkpoint `load`. Kept out of the
package: the shims below make megatron-core 0.16.1 run without CUDA, and are refused where CUDA exists.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEFAULTS = {
    "tp": 1, "pp": 1, "tied": False, "per_layer": False, "singleton": False, "optimizer": False, "extra_state": False,
    "common": "file", "canary": "", "layers": 2, "hidden": 64, "ffn": 96, "heads": 4, "groups": 2, "vocab": 110,
    "padded": 128, "seed": 3, "dtype": "bfloat16", "iteration": 7, "rope": 1e6, "args": True, "fp8_params": False,
    "load": "", "out": "", "fused": False,
}  # fmt: skip


def shims() -> None:
    """What megatron-core calls of CUDA, answered by the CPU."""
    assert not torch.cuda.is_available(), "this is for machines without CUDA"
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *a, **k: None  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()  # type: ignore[method-assign]


def build(o: dict[str, Any]) -> Any:
    """A Qwen2.5-like GPTModel in float32 arithmetic."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=o["layers"], hidden_size=o["hidden"], ffn_hidden_size=o["ffn"], num_attention_heads=o["heads"],
        num_query_groups=o["groups"], add_bias_linear=False, add_qkv_bias=True, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", layernorm_epsilon=1e-6, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, tensor_model_parallel_size=o["tp"],
        pipeline_model_parallel_size=o["pp"], pipeline_dtype=torch.float32, apply_rope_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=o["fused"], persist_layer_norm=False, perform_initialization=True,
    )  # fmt: skip
    from megatron.core import parallel_state as ps

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(
        config, spec, vocab_size=o["padded"], max_sequence_length=64, position_embedding_type="rope",
        rotary_base=o["rope"], share_embeddings_and_output_weights=o["tied"], parallel_output=False,
        pre_process=ps.is_pipeline_first_stage(), post_process=ps.is_pipeline_last_stage(),
    )  # fmt: skip


class Mode(enum.Enum):
    """An enum of a module that no reader can import."""

    FAST = 1


class Rerun:
    """State of a class that no reader can import."""

    def __init__(self) -> None:
        self.mode, self.data = Mode.FAST, {"x": [1, 2]}


class Canary:
    """Runs a command when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def hide() -> None:
    """Makes the two classes above look as if they came from a module that is not there when it is read."""
    module = types.ModuleType("megatron_training_elsewhere")
    for kind in (Mode, Rerun):
        kind.__module__ = module.__name__
        setattr(module, kind.__name__, kind)
    sys.modules[module.__name__] = module


def common_state(o: dict[str, Any]) -> dict[str, Any]:
    """What Megatron-LM's training loop stores beside the tensors."""
    hide()
    state: dict[str, Any] = {"iteration": o["iteration"], "checkpoint_version": 3.0, "rerun_state_machine": Rerun()}
    if o["args"]:
        state["args"] = argparse.Namespace(
            num_layers=o["layers"], hidden_size=o["hidden"], ffn_hidden_size=o["ffn"], num_attention_heads=o["heads"],
            num_query_groups=o["groups"], group_query_attention=True, kv_channels=o["hidden"] // o["heads"],
            padded_vocab_size=o["padded"], vocab_size=o["vocab"], norm_epsilon=1e-6, rotary_base=int(o["rope"]),
            max_position_embeddings=64, untie_embeddings_and_output_weights=not o["tied"], add_qkv_bias=True,
            swiglu=True, normalization="RMSNorm", seq_length=64, micro_batch_size=1, global_batch_size=8, lr=1e-4,
            min_lr=1e-5, train_iters=100, seed=1236, params_dtype=torch.bfloat16, mode=Mode.FAST, bf16=True,
            lr_decay_style="WSD", lr_wsd_decay_iters=20, lr_wsd_decay_style="cosine", lr_warmup_iters=10,
            fp8="e4m3", fp8_recipe="blockwise",
            fp8_param_gather=o["fp8_params"], weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8,
            clip_grad=1.0, init_method_std=0.008, split="90,5,5", tensorboard_dir="/somewhere",
        )  # fmt: skip
    if o["canary"]:
        state["trap"] = Canary(o["canary"])
    return state


def state_dict(model: Any, o: dict[str, Any]) -> dict[str, Any]:
    """The sharded state dict of the model, with optimizer state and FP8 extra state where asked for."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        make_sharded_optimizer_tensor,
    )

    metadata = {"non_homogeneous_layers": o["per_layer"]}
    if o["singleton"]:
        metadata["singleton_local_shards"] = True
    sharded = model.sharded_state_dict(metadata=metadata)
    made: dict[str, Any] = {"model": sharded}
    if o["optimizer"]:
        mapping = get_param_id_to_sharded_param_map(sharded, model.parameters())
        moments = {}
        for i, sharded_param in mapping.items():
            for kind in ("exp_avg", "exp_avg_sq", "fp32_param"):
                value = torch.full_like(sharded_param.data, 0.25, dtype=torch.float32)
                if kind == "fp32_param":
                    value = sharded_param.data.float() * (1 + 2**-12)
                moments[f"{i}.{kind}"] = make_sharded_optimizer_tensor(
                    sharded_param, value, prefix=f"optimizer.state.{kind}"
                )
        made["optimizer"] = moments
    if o["extra_state"]:
        for layer in range(o["layers"]):
            name = f"decoder.layers.{layer}." if o["per_layer"] else "decoder.layers."
            shape, place = ((1,), (0,)) if o["per_layer"] else ((o["layers"],), (layer,))
            key = f"{name}self_attention.linear_qkv._extra_state"
            if dist.get_rank() == 0:
                made[f"extra{layer}"] = ShardedObject(key, io.BytesIO(b"\x80\x04amax"), shape, place)
    return made


def logits(model: Any, o: dict[str, Any]) -> list[list[float]]:
    ids = torch.arange(3, 15)[None] % o["vocab"]
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        out = model(ids, torch.arange(ids.shape[1])[None], mask)
    return out[0, :, : o["vocab"]].tolist()


def load(model: Any, o: dict[str, Any]) -> None:
    """Fills the model from a checkpoint, by megatron-core."""
    from megatron.core import dist_checkpointing as dc

    metadata = {"non_homogeneous_layers": o["per_layer"]}
    for parameter in model.parameters():
        parameter.data.zero_()
    sharded = {"model": model.sharded_state_dict(metadata=metadata)}
    loaded = dc.load(sharded, o["load"])
    model.load_state_dict(loaded["model"])
    assert loaded["args"].num_layers == o["layers"]


def finish() -> None:
    from megatron.core import parallel_state as ps

    dist.barrier()
    ps.destroy_model_parallel()
    dist.destroy_process_group()


def rank_main(rank: int, o: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(o["tp"] * o["pp"]), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(o["port"])
    torch.set_num_threads(1)
    shims()
    dist.init_process_group("gloo", rank=rank, world_size=o["tp"] * o["pp"])
    from megatron.core import dist_checkpointing as dc
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    ps.initialize_model_parallel(o["tp"], o["pp"])
    with contextlib.suppress(Exception):
        model_parallel_cuda_manual_seed(o["seed"])
    torch.manual_seed(o["seed"])
    model = build(o)
    generator = torch.Generator().manual_seed(
        100 * o["seed"] + (ps.get_pipeline_model_parallel_rank() if o["pp"] > 1 else 0)
    )
    for name, parameter in model.named_parameters():
        whole = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data.copy_(whole + float("norm" in name))
        split = getattr(parameter, "tensor_model_parallel", False)
        if split and rank % o["tp"]:  # other rows on other ranks; what is replicated stays the same
            parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)) * 0.05)
        parameter.data = parameter.data.bfloat16().float()
    if o["load"]:
        load(model, o)
    found = logits(model, o) if o["pp"] == 1 else []
    if not o["out"]:
        if rank == 0:
            Path(o["logits"]).write_text(json.dumps(found))
        return finish()
    model = model.to(getattr(torch, o["dtype"]))
    made = state_dict(model, o)
    common = common_state(o)
    if o["common"] == "file":
        made |= common
    elif o["common"] == "inside" and rank == 0:
        made["common_state"] = ShardedObject("common_state", common, (1,), (0,))
    out = Path(o["out"]) / f"iter_{o['iteration']:07d}"
    if rank == 0:
        out.mkdir(parents=True)
    dist.barrier()
    dc.save(made, str(out), validate_access_integrity=not o["extra_state"])
    dist.barrier()
    if rank == 0:
        if o["common"] == "inside":
            (out / "common.pt").unlink()
        (Path(o["out"]) / "latest_checkpointed_iteration.txt").write_text(str(o["iteration"]))
        Path(o["logits"]).write_text(json.dumps(found))
    finish()


def main() -> None:
    import socket

    for given in json.loads(sys.argv[1]):
        options = DEFAULTS | given
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            options["port"] = probe.getsockname()[1]
        world = options["tp"] * options["pp"]
        if world == 1:
            rank_main(0, options)
        else:
            mp.spawn(rank_main, (options,), nprocs=world)


if __name__ == "__main__":
    main()
