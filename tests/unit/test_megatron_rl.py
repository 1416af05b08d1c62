"""Launch scripts of reinforcement learning in the manner of upstream's become the presets of both stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infir2_cli.commands.init import imported_text
from infir2_core.config.presets import load_preset
from infir2_core.config.project import load_project
from infir2_core.convert.megatron.carried import CARRIED_RL, DEFAULTS_RL, IMPLIED_RL, SAME_RL, SWITCHES_RL, WORDS_RL
from infir2_core.convert.megatron.project import Imported, from_script

# What a project does not say: places, trackers, and how work is spread over GPUs.
LEFT = {
    "load", "save", "ref_load", "use_wandb", "wandb_group", "wandb_dir", "tensorboard_dir", "record_memory_history",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel",
    "actor_num_nodes", "actor_num_gpus_per_node", "colocate", "balance_data", "rollout_num_gpus_per_engine",
    "recompute_method", "recompute_num_layers", "accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32",
    "attention_backend", "transformer_impl", "fp8_param_gather",
}  # fmt: skip


def rl_script(stage: int, size: str = "7B") -> str:
    """A script of slime with arrays of flags; `=` forms, quoted values, derived numbers and flags without value."""
    length, temperature = {1: (8192, "1.0"), 2: (16384, "1.1")}[stage]
    return f"""#!/bin/bash
export PYTHONUNBUFFERED=1
source "/nowhere/models/qwen2.5-{size}.sh"
touch {{CANARY}}
WHERE='/ckpt/stage {stage}'
PROMPTS=128
EACH=16
ANSWER={length}
CKPT_ARGS=(
    --hf-checkpoint=/models/start-fp8
    --ref-load /models/start_torch_dist
    --load "$WHERE" --save "$WHERE"
    --save-interval 20
)
ROLLOUT_ARGS=(
    --prompt-data "/data/dapo-math-17k.jsonl"
    --input-key prompt --label-key=label
    --apply-chat-template
    --rollout-shuffle # every pass anew
    --rm-type 'deepscaler'
    --num-rollout=10240
    --rollout-batch-size ${{PROMPTS}} --n-samples-per-prompt ${{EACH}}
    --global-batch-size $((PROMPTS * EACH))
    --over-sampling-batch-size $((PROMPTS * 3))
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --rollout-max-response-len "${{ANSWER}}"
    --rollout-temperature={temperature}
    --balance-data
    # --enable-length-penalty
    # --max-response-length {length}
    # --length-penalty-buffer 1024
)
GRPO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type=low_var_kl
    --entropy-coef 0 --eps-clip 0.2 --eps-clip-high 0.28 --use-tis)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.98)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime "/data/aime-2024.jsonl" --n-samples-per-eval-prompt 16
    --eval-max-response-len 30000 --eval-top-p 0.7)
PERF_ARGS=(
    --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 2
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-dynamic-batch-size --max-tokens-per-gpu {length}
)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.5 --sglang-max-running-requests 128)
LOG_ARGS=(--use-wandb --wandb-group "stage {stage}" --wandb-dir ${{LOGS:-/logs}} --tensorboard-dir=/logs/tb
    --record-memory-history)
MISC_ARGS=(--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32 --attention-backend flash --transformer-impl transformer_engine --bf16)
FP8_ARGS=(--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather)
ray job submit --address="http://127.0.0.1:8265" \\
    --runtime-env-json='{{
        "env_vars": {{"NVTE_DEBUG": "0", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "NO_PROXY": "localhost"}}
    }}' \\
    -- python3 train.py --actor-num-nodes 4 --actor-num-gpus-per-node 8 --colocate \\
    ${{MODEL_ARGS[@]}} ${{CKPT_ARGS[@]}} "${{ROLLOUT_ARGS[@]}}" ${{OPTIMIZER_ARGS[@]}} ${{GRPO_ARGS[@]}} \\
    ${{EVAL_ARGS[@]}} ${{PERF_ARGS[@]}} ${{SGLANG_ARGS[@]}} ${{LOG_ARGS[@]}} ${{MISC_ARGS[@]}} ${{FP8_ARGS[@]}} $@
"""


def write(tmp_path: Path, text: str, name: str = "rl_stage1.sh") -> Path:
    path = tmp_path / name
    path.write_text(text.replace("{CANARY}", str(tmp_path / "canary")))
    return path


def loaded(tmp_path: Path, imported: Imported) -> Any:
    (tmp_path / "infir2.toml").write_text(imported_text("p", imported))
    return load_project(tmp_path / "infir2.toml")


def changed(tmp_path: Path, *changes: tuple[str, str], stage: int = 1) -> Imported:
    """What comes of a script with texts replaced."""
    text = rl_script(stage)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return from_script(write(tmp_path, text, f"rl_stage{stage}.sh"))


def own(imported: Imported) -> dict[str, Any]:
    """The settings that differ from the preset."""
    return {name: value for name, value in imported.rl["1"].items() if name not in ("data", "eval_data")}


@pytest.mark.parametrize("stage", [1, 2])
def test_the_two_scripts_give_the_presets(tmp_path: Path, stage: int) -> None:
    imported = from_script(write(tmp_path, rl_script(stage), f"RL_7B_stage{stage}_4node.sh"))
    assert (imported.size, imported.stage, imported.source) == ("7b", "rl", "/models/start-fp8")
    data = {"data": "/data/dapo-math-17k.jsonl", "eval_data": {"aime": "/data/aime-2024.jsonl"}}
    assert imported.rl == {str(stage): data} and imported.cpt == {} and imported.sft == {}
    project = loaded(tmp_path, imported)
    section = project.rl[str(stage)]
    assert list(project.rl) == [str(stage)] and section.settings() == {}
    assert (section.data, section.eval_data) == (data["data"], data["eval_data"])
    assert set(imported.left) == LEFT
    assert "context parallelism" in " ".join(imported.notes) and not (tmp_path / "canary").exists()


# A value other than the preset's for each number that a flag carries; row_tokens is twice the tokens a GPU.
OTHER = {
    "steps": 99, "global_batch": 1024, "warmup_steps": 3, "rollout_prompts": 256, "samples_per_prompt": 32,
    "oversample_prompts": 400, "max_prompt_tokens": 1024, "max_response_tokens": 4096, "temperature": 0.9,
    "sampler_memory": 0.25, "sampler_requests": 64, "overlong_buffer": 512, "overlong_factor": 0.5, "clip_low": 0.1,
    "clip_high": 0.3, "kl_coef": 0.01, "entropy_coef": 0.02, "tis_cap": 3.0, "row_tokens": 65536, "eval_samples": 8,
    "eval_tokens": 20000, "eval_temperature": 0.6, "eval_top_p": 0.95, "lr": 2e-6, "min_lr": 1e-7,
    "weight_decay": 0.2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "clip": 0.5, "seed": 7, "eval_every": 5,
    "save_every": 10,
}  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), CARRIED_RL.items())
def test_every_number_is_taken_from_its_flag(tmp_path: Path, theirs: str, ours: str) -> None:
    value = OTHER[ours]
    typed = value // 2 if ours == "row_tokens" else value
    script = write(tmp_path, rl_script(1).replace(" $@", f" --{theirs.replace('_', '-')}={typed}"))
    expected = {ours: value} | ({"eval_temperature": value} if ours == "temperature" else {})
    imported = from_script(script)
    assert own(imported) == expected and set(imported.left) == LEFT


def test_the_tables_speak_of_settings_that_exist() -> None:
    names = {*CARRIED_RL.values(), *WORDS_RL.values(), *(ours for ours, *_ in SWITCHES_RL.values())}
    assert names <= set(load_preset("7b").rl["1"].model_dump())
    ours = {*CARRIED_RL, *WORDS_RL, *IMPLIED_RL}
    assert set(SAME_RL) <= set(CARRIED_RL) and {*SAME_RL.values(), *DEFAULTS_RL} <= ours


def test_a_silent_script_gets_what_slime_does_then(tmp_path: Path) -> None:
    text = "source /nowhere/qwen2.5-7B.sh\npython train.py --rollout-batch-size 32 --n-samples-per-prompt 8 "
    text += "--global-batch-size 256 --rollout-max-response-len 4096 --rollout-temperature 0.8\n"
    imported = from_script(write(tmp_path, text))
    assert own(imported) == {
        "recipe": "bf16", "rollout_prompts": 32, "samples_per_prompt": 8, "global_batch": 256,
        "oversample_prompts": 32, "max_response_tokens": 4096, "temperature": 0.8, "dynamic_filter": False,
        "tis": False, "clip_high": 0.2, "kl_estimator": "k1", "weight_decay": 0.01, "beta2": 0.999, "eval_every": 0,
        "eval_samples": 1, "eval_tokens": 4096, "eval_temperature": 0.8, "eval_top_p": 1.0,
    }  # fmt: skip
    assert imported.left == {} and loaded(tmp_path, imported).rl["1"].settings() == own(imported)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ((" --use-tis", ""), {"tis": False}),
        ((" --use-tis", " --use-tis --tis-clip=5"), {"tis_cap": 5.0}),
        ((" --use-tis", " --use-tis --calculate-per-token-loss"), {"loss_mean": "token"}),
        (("--kl-loss-coef 0.00", "--kl-loss-coef 0.01"), {"kl_coef": 0.01}),
        (("low_var_kl", "k3"), {"kl_estimator": "k3"}),
        (("    # --enable-length-penalty\n", "    --enable-length-penalty\n"), {"overlong_penalty": True}),
        (("    # --length-penalty-buffer 1024\n", "    --length-penalty-buffer 512\n"), {"overlong_buffer": 512}),
        (("    # --max-response-length 8192\n", "    --max-response-length 8192\n"), {}),
        (("--num-rollout=10240", '--num-rollout "300"'), {"steps": 300}),
        (("--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather", ""), {"recipe": "bf16"}),
        (('"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"', '"A": "1"'), {"recipe": "infir2"}),
        (('"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"', '"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": 1'), {}),
        (("--context-parallel-size 2", "--context-parallel-size 4"), {"row_tokens": 32768}),
        (("--context-parallel-size 2", "--context-parallel-size 1"), {"row_tokens": 10240}),
        (("--max-tokens-per-gpu 8192", "--max-tokens-per-gpu 9000"), {"row_tokens": 18048}),
    ],
)
def test_what_differs_from_the_preset_is_written(
    tmp_path: Path, change: tuple[str, str], expected: dict[str, Any]
) -> None:
    imported = changed(tmp_path, change)
    assert own(imported) == expected and set(imported.left) <= LEFT
    assert loaded(tmp_path, imported).rl["1"].settings() == expected


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (("--rm-type 'deepscaler'", "--rm-type math"), "rm_type", "infir2 knows deepscaler, not math"),
        (("low_var_kl", "k4"), "kl_loss_type", "infir2 knows k1, k2, k3, low_var_kl, not k4"),
        (("estimator grpo", "estimator ppo"), "advantage_estimator", "infir2 computes advantage_estimator = grpo"),
        ((".check_reward_nonzero_std", ".keep_all"), "dynamic_sampling_filter_path", "no setting of infir2"),
        (("--use-kl-loss --kl-loss-coef 0.00", "--kl-loss-coef 0.1"), "kl_loss_coef", "without --use-kl-loss"),
        (("--eps-clip 0.2", "--eps-clip narrow"), "eps_clip", "no number that can be taken (narrow)"),
        (("--lr 1e-6", "--lr $(cat lr)"), "lr", "known only when the script runs"),
        (("aime \"/data", "\"/data"), "eval_prompt_data", "no setting of infir2"),
        (("--input-key prompt", "--input-key question"), "input_key", "input_key = prompt, not question"),
        (("--use-tis", "--use-tis --partial-rollout"), "partial_rollout", "no setting of infir2"),
    ],
)  # fmt: skip
def test_what_is_not_carried_over_is_listed_with_the_reason(
    tmp_path: Path, change: tuple[str, str], name: str, words: str
) -> None:
    imported = changed(tmp_path, change)
    assert words in imported.left[name] and own(imported) == {}
    assert set(imported.left) == LEFT | {name}


def test_the_reasons_say_what_to_do_instead(tmp_path: Path) -> None:
    left = from_script(write(tmp_path, rl_script(1))).left
    for name in ("context_parallel_size", "tensor_model_parallel_size", "colocate", "rollout_num_gpus_per_engine"):
        assert "how it is spread over GPUs" in left[name]
    assert "infir2 convert to-hf /models/start_torch_dist HF_DIR" in left["ref_load"]


def test_no_value_is_derived_from_one_that_only_running_would_tell(tmp_path: Path) -> None:
    imported = changed(tmp_path, ("$((PROMPTS * 3))", "$(many)"), ("--eps-clip-high 0.28", "--eps-clip-high $(high)"))
    assert own(imported) == {} and {"over_sampling_batch_size", "eps_clip_high"} <= set(imported.left)


def test_what_cannot_be_used_is_said_and_contradictions_too(tmp_path: Path) -> None:
    imported = changed(tmp_path, ("EACH=16", "EACH=1"), ("PROMPTS * EACH", "128 * 16"))
    assert "samples_per_prompt must be at least 2, not 1; the preset's 16 is kept" in imported.notes
    assert own(imported) == {} and loaded(tmp_path, imported).rl["1"].settings() == {}
    imported = changed(tmp_path, ("PROMPTS * EACH", "PROMPTS * EACH - 1"))
    (note,) = [note for note in imported.notes if "before use" in note]
    assert "[rl.1]" in note and "global_batch (2047)" in note and own(imported) == {"global_batch": 2047}


@pytest.mark.parametrize(
    ("assignment", "use"),
    [
        ("""ENV='{"env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}}'""", '"$ENV"'),
        ('''ONE=1\nENV="{\\"env_vars\\": {\\"NVTE_FP8_BLOCK_SCALING_FP32_SCALES\\": \\"${ONE}\\"}}"''', '"${ENV}"'),
        ("export NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1", "'{}'"),
    ],
)
@pytest.mark.parametrize("sign", ["=", " "])
def test_the_environment_that_ray_gives_the_program_counts(
    tmp_path: Path, assignment: str, use: str, sign: str
) -> None:
    text = rl_script(1)
    start, end = text.index("--runtime-env-json="), text.index("    -- python3")
    text = f"{text[:start]}--runtime-env-json{sign}{use} \\\n{text[end:]}".replace("touch", f"{assignment}\ntouch")
    imported = from_script(write(tmp_path, text))
    assert own(imported) == {} and not any("JSON" in note for note in imported.notes)


@pytest.mark.parametrize("text", ["'{\"env_vars\"'", "'[]'", "'{\"env_vars\": 3}'", ""])
def test_an_environment_that_is_no_json_is_said(tmp_path: Path, text: str) -> None:
    whole = rl_script(1)
    start, end = whole.index("--runtime-env-json="), whole.index("    -- python3")
    script = f"{whole[:start]}--runtime-env-json {text} \\\n{whole[end:]}"
    imported = from_script(write(tmp_path, script))
    assert any("--runtime-env-json is no JSON" in note for note in imported.notes)
    assert own(imported) == {"recipe": "infir2"}


def test_other_sizes_take_their_own_presets(tmp_path: Path) -> None:
    imported = from_script(write(tmp_path, rl_script(1, "1.5B")))
    assert imported.size == "1.5b" and own(imported) == {}


def test_the_command(tmp_path: Path, run_cli: Any) -> None:
    script = write(tmp_path, rl_script(2), "rl_stage2.sh")
    done = run_cli("init", "p", "--from-script", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"not carried over, {len(LEFT)} arguments" in done.stdout
    assert "no command trains by it" in done.stdout and "next: infir2" not in done.stdout
    assert load_project(tmp_path / "p/infir2.toml").rl["2"].eval_data == {"aime": "/data/aime-2024.jsonl"}
    done = run_cli("init", "q", "--from-script", script, "--json", "--dry-run", cwd=tmp_path)
    assert set(json.loads(done.stdout)["not_carried_over"]) == LEFT and not (tmp_path / "q").exists()
