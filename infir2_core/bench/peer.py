"""The peer: a training step of Megatron-core with TransformerEngine, measured like our arms (arm.py).

    python -m infir2_core.bench.peer '{"size": "1.5b", "recipe": "fp8", ...}'

Runs in an environment that has both packages; nothing of the native engine is imported. It gets what helps it: one
fused cross-entropy, fused RoPE and SwiGLU, cuDNN attention, FP8 parameters, weight gradients that the layers' GEMMs add
to the gradient buffer themselves, the distributed optimizer, the same tokens, and the vocabulary padded as Megatron
pads it. Gradients are float32, as ours are; `fp8-lean` stores moments in FP8 and gradients in bf16, as `infir2-lean`
does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

from .arm import ArmSpec, ArmTimes, Clock, by_phase, guarded, show, since_start, text_tokens
from .child import wait
from .clocks import Meter

PACKAGES = ("transformer-engine", "megatron-core")


def missing() -> list[str]:
    """Packages of the peer that are not installed here."""
    from importlib.util import find_spec

    modules = {"transformer-engine": "transformer_engine", "megatron-core": "megatron.core"}
    return [package for package, module in modules.items() if find_spec(module) is None]


def measure(spec: ArmSpec, waited: float = 0.0) -> ArmTimes:
    """Runs the peer; `spec.recipe` is `bf16`, `fp8` (blockwise E4M3, FP8 parameters) or `fp8-lean`."""
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
    }
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_FUSED_ATTN": "1"}
    import torch

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl")
    model, optimizer = _build(spec)
    rows = torch.tensor(text_tokens((spec.after + max(1, spec.warmup) + spec.steps) * spec.rows * (spec.seq_len + 1)))
    batches = iter(rows.to(torch.int64).cuda().view(-1, spec.rows, spec.seq_len + 1))
    positions = torch.arange(spec.seq_len, device="cuda")[None].expand(spec.rows, -1)
    made = ArmTimes(parameters=sum(p.numel() for p in model.parameters()))

    def step(tokens: torch.Tensor, mark: Callable[[], object] = lambda: None) -> torch.Tensor:
        # Megatron's schedule does this before a step's first microbatch: FP8 linears then overwrite the buffer.
        model.set_is_first_microbatch()
        model.zero_grad_buffer()
        if optimizer is not None:
            optimizer.zero_grad()
        loss = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()).float().mean()
        mark()
        loss.backward()
        model.finish_grad_sync()
        mark()
        if optimizer is not None:
            optimizer.step()
        mark()
        return loss.detach()

    meter = Meter(spec.device)
    step(next(batches)).item()
    made.first_step_s = since_start(waited)
    check_fused(model)
    for _ in range(spec.after + spec.warmup - 1):
        step(next(batches))
    torch.cuda.reset_peak_memory_stats()
    clock, losses = Clock(True), []
    with meter:
        for _ in range(spec.steps):
            tokens = next(batches)
            clock.mark()
            losses.append(step(tokens, clock.mark))
        # Read at the end, as ours are: between steps nothing waits for the device.
        made.ms = by_phase(clock.intervals())
    made.load = meter.load()
    made.losses = [float(loss) for loss in losses]
    made.peak_gb = torch.cuda.max_memory_allocated() / 2**30
    made.reserved_gb = torch.cuda.max_memory_reserved() / 2**30
    made.versions = {"torch": torch.__version__} | {package: version(package) for package in PACKAGES}
    if spec.profile:
        from .profile import profile

        made.profile = profile(lambda: step(tokens)).told()
    return made


def fused_where_possible(make: Callable[[], Any]) -> Any:
    """The model that `make` builds from a config with `gradient_accumulation_fusion`.

    TransformerEngine's linears accumulate weight gradients by their own GEMM. megatron-core's linears, of which the
    head is the one here, need an extension of Apex and refuse to be built without it: they are built and then told to
    leave their gradient to autograd.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, layers

    apex = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        model = make()
    finally:
        layers._grad_accum_fusion_available = apex
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.gradient_accumulation_fusion = apex
    return model


def check_fused(model: Any) -> None:
    """After a backward: every TransformerEngine linear must have added its weight's gradient to the buffer itself.

    Raises:
        RuntimeError: one has not, so that the times would not be those of what the documentation says.
    """
    linears = {name: m for name, m in model.named_modules() if getattr(m, "fuse_wgrad_accumulation", False)}
    left = [name for name, m in linears.items() if not getattr(m.weight, "grad_added_to_main_grad", False)]
    if left or not linears:
        found = f"{len(left)} of {len(linears)} linears did not, {left[0]} among them" if left else "no linear does"
        raise RuntimeError(f"TransformerEngine should accumulate weight gradients in its GEMMs, but {found}")


def _build(spec: ArmSpec) -> tuple[Any, Any]:
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    from ..config.presets import load_preset

    shape, settings = load_preset(spec.size).model, load_preset(spec.size).cpt
    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    lean = spec.recipe == "fp8-lean"
    fp8 = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True} if spec.recipe != "bf16" else {}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=spec.layers or shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        add_bias_linear=False,
        add_qkv_bias=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        apply_rope_fusion=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        init_method_std=settings.init_std,
        gradient_accumulation_fusion=True,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
        **fp8,
        **(full if spec.recompute == "full" else {}),
    )
    make = partial(
        GPTModel,
        config,
        get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=-(-shape.vocab // 128) * 128,
        max_sequence_length=spec.seq_len,
        parallel_output=True,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_base),
        share_embeddings_and_output_weights=shape.tied,
    )
    model = fused_where_possible(make).cuda()
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not lean,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        fp8_param_gather=bool(fp8),
    )
    wrapped = DistributedDataParallel(config, ddp, Float16Module(config, model))
    if not spec.optimizer:
        return wrapped, None
    narrow: dict[str, Any] = {"use_precision_aware_optimizer": True, "main_grads_dtype": torch.bfloat16}
    narrow |= {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}  # its name for FP8
    adam = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=settings.clip,
        fp8_recipe="blockwise" if fp8 else None,
        **(narrow if lean else {}),
    )
    return wrapped, get_megatron_optimizer(adam, [wrapped])


def main() -> None:
    """Entry point of the process."""
    spec = ArmSpec(**json.loads(sys.argv[1]))
    waited = wait(_import)
    show(guarded(spec, lambda: measure(spec, waited)))


def _import() -> None:
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401


if __name__ == "__main__":
    main()
