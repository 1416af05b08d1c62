"""Project files from launch scripts in the manner of upstream's and from the arguments inside a checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hf_models import write_model

from infir2_cli.commands.init import imported_text
from infir2_core.config.presets import load_preset
from infir2_core.config.project import load_project
from infir2_core.convert.megatron.project import Imported, from_checkpoint, from_script
from infir2_core.convert.megatron.scripts import _flags, read_script
from infir2_core.convert.megatron.write import export_megatron
from infir2_core.convert.weights import HFWeights
from infir2_core.errors import InputError

SHAPES = {"1.5b": (28, 1536, 8960, 12, 2, 2), "7b": (28, 3584, 18944, 28, 4, 4)}


def cpt_script(size: str, decay: bool) -> str:
    layers, hidden, ffn, heads, groups, tp = SHAPES[size]
    untie = "--untie-embeddings-and-output-weights \\\n" if size == "7b" else ""
    load = "--override-opt_param-scheduler" if decay else "--no-load-optim"
    return f"""#!/bin/bash
NODES=1  # how many machines
EXTRA=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --nnodes) NODES="$2"; shift 2 ;;
        *) EXTRA+=("$1"); shift ;;
    esac
done
touch {{CANARY}}
WHEN=`touch {{CANARY}}`
export CUDA_DEVICE_MAX_CONNECTIONS=1
OUT=`pwd`/exp/run
mkdir -p $OUT
SEQ=32768
WARMUP={0 if decay else 5000}
MODEL=" \\
    --use-mcore-models --swiglu --normalization RMSNorm --disable-bias-linear --add-qkv-bias \\
    {untie}    --position-embedding-type rope --rotary-percent 1.0 --rotary-base 1000000 --norm-epsilon 1e-6 \\
    --seq-length ${{SEQ}} --max-position-embeddings ${{SEQ}} \\
    --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads} \\
    --group-query-attention --num-query-groups {groups} --attention-dropout 0.0 --hidden-dropout 0.0 \\
    --vocab-size 152064 {load}
"
PARALLEL="--micro-batch-size 1 --global-batch-size 128 --tensor-model-parallel-size {tp} --sequence-parallel"
LOGS=" --train-iters 40000 --save-interval 1000 --eval-interval 100 --eval-iters 10 --wandb-project "some_name" "
TRAIN="--seed 1236 --lr 1e-4 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \\
    --lr-decay-style WSD --lr-warmup-iters $WARMUP --lr-wsd-decay-style cosine --lr-wsd-decay-iters 5000 \\
    --min-lr 1e-5 --init-method-std 0.008"
FP8="--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather"
    # --exp-avg-dtype bf16
torchrun --nproc_per_node=8 --nnodes=$NODES ${{CODE}}/pretrain_gpt.py \\
    --split 90,5,5 --data-path /data/web $MODEL $PARALLEL $LOGS $TRAIN $FP8 \\
    --save $OUT --load ${{OUT}} "${{EXTRA[@]}}"
# --load /elsewhere
"""


def slime_script(size: str, kind: str, source: str = "/nowhere/models") -> str:
    sft = "--loss-type sft_loss --num-epoch 5 --rollout-batch-size 64 --global-batch-size 64"
    rl = "--advantage-estimator grpo --rm-type deepscaler --global-batch-size ${GLOBAL} --rollout-batch-size ${bsz}"
    return f"""#!/bin/bash
source "{source}/qwen2.5-{size.upper()}.sh"
HF=/models/base/
bsz=128
N=16
GLOBAL=$((bsz * N))
CKPT_ARGS=(
   --hf-checkpoint ${{HF}}   # with a remark
   #--ref-load /old
   --save-interval 20
)
MAIN_ARGS=(
   {sft if kind == "sft" else rl}
   --use-dynamic-batch-size
)
OPTIMIZER=(--optimizer adam --lr 1e-6 --weight-decay 0.1)
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{{
        "env_vars": {{"A": "$(touch {{CANARY}})", "B": "--lr 5"}}
   }}' \\
   -- python3 train{"_async" if kind == "sft" else ""}.py --actor-num-nodes 2 \\
   ${{MODEL_ARGS[@]}} ${{CKPT_ARGS[@]}} ${{MAIN_ARGS[@]}} ${{OPTIMIZER[@]}} $@
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "launch.sh"
    path.write_text(text.replace("{CANARY}", str(tmp_path / "canary")))
    return path


def loaded(tmp_path: Path, imported: Imported) -> Any:
    (tmp_path / "infir2.toml").write_text(imported_text('odd "name"', imported))
    return load_project(tmp_path / "infir2.toml")


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("decay", [False, True])
def test_the_four_scripts_of_continual_pre_training_give_the_presets(tmp_path: Path, size: str, decay: bool) -> None:
    imported = from_script(write(tmp_path, cpt_script(size, decay)))
    assert (imported.size, imported.stage, imported.cpt) == (size, "cpt", {})
    project = loaded(tmp_path, imported)
    assert project.model.size == size and project.data["part1"].specs == ["/data/web"]
    preset = load_preset(size).cpt.model_dump()
    assert preset | project.cpt.settings() == preset
    assert any("--phase decay" in note for note in imported.notes) == decay
    left = {"load", "save", "wandb_project", "tensor_model_parallel_size", "sequence_parallel", "fp8_param_gather"}
    assert set(imported.left) == left | (set() if decay else {"no_load_optim"})
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("size", ["7b", "1.5b"])
def test_scripts_of_slime_for_fine_tuning_give_a_stage(tmp_path: Path, size: str) -> None:
    imported = from_script(write(tmp_path, slime_script(size, "sft")))
    assert (imported.size, imported.stage, imported.source, imported.cpt) == (size, "sft", "/models/base/", {})
    project = loaded(tmp_path, imported)
    # The script has no FP8 flags; what is that of the preset is not written.
    expected = {"lr": 1e-6, "weight_decay": 0.1, "save_every": 20, "recipe": "bf16"}
    assert project.model.from_ == "/models/base/" and project.sft["1"].settings() == expected
    assert not {"lr", "num_epoch", "global_batch_size", "rollout_batch_size", "loss_type"} & set(imported.left)
    assert "use_dynamic_batch_size" not in imported.left and not (tmp_path / "canary").exists()


def test_a_fine_tuning_script_like_the_published_one_leaves_nothing_to_write(tmp_path: Path) -> None:
    text = slime_script("7b", "sft").replace("--lr 1e-6 --weight-decay 0.1", "")
    flags = """--lr 2e-5 --min-lr 2e-6 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.0 \\
   --adam-beta1 0.9 --adam-beta2 0.95 --max-tokens-per-gpu 32768 --prompt-data /data/chats.jsonl --save-interval 1000 \\
   --recompute-granularity full --fp8-format e4m3 --fp8-recipe blockwise --input-key messages"""
    path = write(tmp_path, text.replace("--save-interval 20", "").replace("$@", flags))
    for name, stage in (("launch.sh", "1"), ("sft_stage2.sh", "2")):
        path = path.rename(tmp_path / name)
        imported = from_script(path)
        assert imported.sft == {stage: {"data": "/data/chats.jsonl", "recompute": "full"}}, imported.left
        assert loaded(tmp_path, imported).sft[stage].data == "/data/chats.jsonl"
    short = from_script(write(tmp_path, path.read_text().replace("32768", "8192").replace("0.05", "x")))
    assert (short.sft["1"]["row_tokens"], short.sft["1"]["max_tokens"]) == (8192, 8192)
    assert "no number" in short.left["lr_warmup_fraction"]


def test_a_sourced_file_that_is_there_is_read(tmp_path: Path) -> None:
    layers, hidden, ffn, heads, groups, _ = SHAPES["7b"]
    (tmp_path / "qwen2.5-3B.sh").write_text(
        f"MODEL_ARGS=(\n --num-layers {layers} --hidden-size {hidden}\n --ffn-hidden-size {ffn} # wide\n"
        f" --num-attention-heads {heads} --num-query-groups {groups}\n)\n"
    )
    imported = from_script(write(tmp_path, slime_script("3b", "sft", str(tmp_path))))
    assert imported.size == "7b"  # what the file says, not what it is called


def test_what_differs_from_the_preset_is_written(tmp_path: Path) -> None:
    text = cpt_script("7b", False).replace("--lr 1e-4", "--lr 3e-4").replace("--seed 1236 ", "")
    text = text.replace("--fp8-recipe blockwise", "--fp8-recipe tensorwise").replace("RMSNorm", "LayerNorm")
    text = text.replace("--data-path /data/web", "--data-path 0.3 /data/a 0.7 /data/b")
    imported = from_script(write(tmp_path, text))
    assert imported.cpt == {"lr": 3e-4, "seed": 1234}  # without a flag it is Megatron's own seed
    assert "infir2 computes normalization = RMSNorm, not LayerNorm" in imported.left["normalization"]
    assert imported.left["fp8_recipe"] == "no setting of infir2 (tensorwise)" and "fp8" in imported.left
    data = loaded(tmp_path, imported).data
    assert {(section.specs[0], section.weight) for section in data.values()} == {("/data/a", 0.3), ("/data/b", 0.7)}


@pytest.mark.parametrize("line", ["export NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1\n", ""])
def test_float32_scales_are_chosen_by_the_environment(tmp_path: Path, line: str) -> None:
    text = cpt_script("1.5b", False).replace("NODES=1", f"{line}NODES=1", 1)
    assert from_script(write(tmp_path, text)).cpt == ({"recipe": "infir2-fp32-scales"} if line else {})


def test_bf16_scripts_get_the_recipe_without_fp8(tmp_path: Path) -> None:
    text = cpt_script("1.5b", False).replace("--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather", "")
    assert from_script(write(tmp_path, text)).cpt == {"recipe": "bf16"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo hello\n", "starts none of pretrain_gpt.py"),
        ("torchrun pretrain_gpt.py --lr 1e-4\n", "nothing says which model"),
        ("torchrun pretrain_gpt.py --num-layers 5 --hidden-size 6 --ffn-hidden-size 7\n", "fits none of the sizes"),
        ('A="unclosed\ntorchrun pretrain_gpt.py\n', "cannot be read: No closing quotation"),
        (
            'A=("a b")\n' + 'A+=("${A[@]}")\n' * 60 + "torchrun pretrain_gpt.py --x $A\n",
            "more than 1,048,576 characters",
        ),
        ("A=0123456789\n" + "A=$A$A\n" * 60 + "torchrun pretrain_gpt.py --x $A\n", "more than 1,048,576 characters"),
        (f"f() {{ {'f; ' * 200}}}\nf\ntorchrun pretrain_gpt.py --x\n", "more than 100,000 statements"),
    ],
)
def test_scripts_that_say_too_little(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        from_script(write(tmp_path, text))


def test_the_shell_by_cases(tmp_path: Path) -> None:
    """Quoting, defaults, appending, arithmetic and repeated flags, as bash would have them."""
    script = write(
        tmp_path,
        "A=3; B=${A:-4}\nC=${MISSING:-7}\nD=$((A * (B + 2) - 1))\nE='$A'\nF=\"x $A\"\n"
        "G=(--one 1)\nG+=(--two \"2 3\")\nH=--h=5\n"
        "python train.py --b $B --c $C --d $D --e $E --f \"$F\" ${G[@]} $H --neg -1 --flag --c 8 #--gone\n",
    )  # fmt: skip
    assert read_script(script).flags == {
        "b": ["3"], "c": ["8"], "d": ["14"], "e": ["$A"], "f": ["x 3"], "one": ["1"], "two": ["2", "3"], "h": ["5"],
        "neg": ["-1"], "flag": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("A=1 B=2 torchrun train.py --x 5", {"x": ["5"]}),
        ("export NCCL=1; env A=1 python3 /code/train.py --x 5", {"x": ["5"]}),
        ("python train.py --x 5 2>&1 | tee log.txt", {"x": ["5"]}),
        ("python train.py --x 5 &> log.txt &", {"x": ["5"]}),
        ("python train.py --x 5 > 'a log' 2>/dev/null --y 6 >> b; echo --z 7", {"x": ["5"], "y": ["6"]}),
        ("python train.py --x 5 > >(tee -a log) 2>&1 && echo --z 7 || exit 1", {"x": ["5"]}),
        ("python train.py --x 'a|b>c;d' --y \"e & f\" < input", {"x": ["a|b>c;d"], "y": ["e & f"]}),
        ("cd /code && python train.py \\\n --x 5 \\\n|& tee log --z 7\necho --z 8", {"x": ["5"]}),
        ("export A=24 B=896\npython train.py --x $A --y ${B}", {"x": ["24"], "y": ["896"]}),
        ("declare -r A=24 B='8 9'; python train.py --x $A --y $B", {"x": ["24"], "y": ["8", "9"]}),
        ("A=24 B=896\nexport A\npython train.py --x $A --y $B", {"x": ["24"], "y": ["896"]}),
        ("python train.py --x ${S:=4096} --y $S --z ${1:-7}", {"x": ["4096"], "y": ["4096"], "z": ["7"]}),
        ("python train.py --x ${S:-${T:-3}} --y ${S-4} --z ${S=5}", {"x": ["3"], "y": ["4"], "z": ["5"]}),
        ('A="$(echo "b c" | wc)"; python train.py --x "$A" --y 6', {"x": ["$(echo b c | wc)"], "y": ["6"]}),
        ("if true; then python train.py --x 5; fi", {"x": ["5"]}),
        ("for i in 1 2; do echo $i; done > log\npython train.py --x 5", {"x": ["5"]}),
        ("if python train.py --x 5; then echo --y 6; fi", {"x": ["5"]}),
        ("A=1\nif test a; then A=2; python train.py --x $A; else A=3; fi", {"x": ["2"]}),
        ("A=1\nif test a; then A=2\nelif test b\nthen python train.py --x $A; fi", {"x": ["1"]}),
        ("A=1\nif a; then B=2; if b; then A=3; fi; python train.py --x $A --y $B; fi", {"x": ["1"], "y": ["2"]}),
        ("A=1\nif a; then A=2; fi; python train.py --x $A", {"x": ["1"]}),
        ("case $1 in\n a | b) A=1 ;;\n 'c d') A=2\n python train.py --x $A;;\n (*) A=3 ;; esac", {"x": ["2"]}),
        ('case "$X" in --lr=*) A=1;; *) python train.py --x "$A";; esac', {"x": [""]}),
        ("for A in 1 2; do B=7; python train.py --x $A --y $B; done", {"x": ["${A}"], "y": ["7"]}),
        ("while read -r A; do python train.py --x $A; done < list", {"x": ["${A}"]}),
        ("( cd /code # there\n A=4\n python train.py --x $A --y 6 ) > log\necho --z", {"x": ["4"], "y": ["6"]}),
        ("run() {\n python train.py --x $A\n}\nA=5\nrun", {"x": ["5"]}),
        (
            "run ()\n{\n if a; then { B=6; }; fi\n A=4; }\nA=5; B=3; run; python train.py --x $A --y $B",
            {"x": ["4"], "y": ["3"]},
        ),
        ("f() { g; }; g() ( python train.py --x $1 )\nunused() { python train.py --y 7; }\nf 3", {"x": ["$1"]}),
        ("f() { f; python train.py --x 5; }; f", {"x": ["5"]}),
        ("function run { python train.py --x $A; }\nA=5\nrun", {"x": ["5"]}),
        ("bash -c 'cd /code && python train.py --x 5 | tee log'", {"x": ["5"]}),
        (
            "A=$((-7 / 2))\npython train.py --x $A --y $((-7 % 3)) --z $((7 - 8 * 2))",
            {"x": ["-3"], "y": ["-1"], "z": ["-9"]},
        ),
        ("A=$((9223372036854775807 + 1))\npython train.py --x=$A", {"x": ["-9223372036854775808"]}),
        ('A=5; CMD="python train.py --x $A"; eval "$CMD"', {"x": ["5"]}),
        ("echo python train.py --x 4; pkill -f train.py; python train.py --x 5", {"x": ["5"]}),
    ],
)
def test_what_belongs_to_the_command(tmp_path: Path, command: str, expected: dict[str, list[str]]) -> None:
    assert read_script(write(tmp_path, command + "\n")).flags == expected


@pytest.mark.parametrize(
    "text",
    [
        'A=(--x "2 3" --y "$B")\npython train.py "${A[@]}" "${NONE[@]}" --z 4',
        "A=(--x 1)\nA+=(--y '$B' 'it\"s' \"don't\")\npython train.py \"${A[@]}\"",
        'A=()\npython train.py --x "${A[@]}" --y 1 "${A[@]}"',
        'A=(1 2)\nB=("${A[@]}" 3)\nA=("x y" "${B[@]}")\npython train.py --x "${A[@]}" --y ${B[@]}',
        'A=5\npython train.py --y "${A[@]}" --z ${A}',
        'A=\'say "b c" \\d\'\npython train.py --x "$A" --y ${A} --z "${B:-$A}"',
        'A="{\\"k\\": \\"v w\\"}"\npython train.py --x="${A}" --y "1 $A"',
    ],
)
def test_arrays_and_quotes_inside_of_values_are_as_in_bash(tmp_path: Path, text: str) -> None:
    shown = subprocess.run(
        ["bash", "-c", f"python() {{ shift; printf '%s\\0' \"$@\"; }}\n{text}"], capture_output=True, check=True
    )
    assert read_script(write(tmp_path, text + "\n")).flags == _flags(shown.stdout.decode().split("\0")[:-1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat > hosts <<EOF\npython train.py --x 4 don't\nA=9\nEOF\npython train.py --x $A", {"x": ["5"]}),
        ("cat <<'END' | tee log\nif then \"\nEND\npython train.py --x $A", {"x": ["5"]}),
        ("cat <<-E\n\tA=9 (\n\tE\npython train.py --x $A", {"x": ["5"]}),
        ("cat <<A1 <<B1 >log\nA=8\nA1\nA=9 '\nB1\npython train.py --x $A", {"x": ["5"]}),
        ("T=$(cat <<E\ndon't )\nE\n)\npython train.py --x $A", {"x": ["5"]}),
        ("B=$((1 << 3)); python train.py --x $A # <<E\nA=9", {"x": ["5"]}),
        ("python - <<E\nimport train.py\nE\npython train.py --x $A <<<here", {"x": ["5"]}),
        ("bash <<E\ncd /code\npython train.py --x $A --y \\$B\nE\n", {"x": ["5"], "y": []}),
        ("sbatch <<'E'\n#SBATCH -N 2\nA=6; B=7\nsrun python train.py --x $A --y $B\nE\n", {"x": ["6"], "y": ["7"]}),
        ("sbatch <<E\nB=7\npython train.py --x $A --y \\$B \\\\\n --z 1\nE\n", {"x": ["5"], "y": ["7"], "z": ["1"]}),
        ("cat <<E | ssh host bash -s\npython train.py --x $A\nE\n", {"x": ["5"]}),
        ("cat <<E \\\n | bash\npython train.py --x $A\nE\n", {"x": ["5"]}),
        ("( bash <<E\npython train.py --x $A 'a'\nE\n)\n", {"x": ["5", "a"]}),
        ("if a; then A=6; srun bash <<E\npython train.py --x $A\nE\nfi", {"x": ["6"]}),
        ("python train.py --x $A <<E\nnever closed '", {"x": ["5"]}),
    ],
)  # fmt: skip
def test_here_documents(tmp_path: Path, text: str, expected: dict[str, list[str]]) -> None:
    """Text, unless a shell reads them; then the outer variables are put in where the delimiter is not quoted. Bash
    itself is asked too, with commands that only show what they were given."""
    script = write(tmp_path, f"A=5\n{text}\n")
    assert read_script(script).flags == expected
    stubs = tmp_path / "bin"
    stubs.mkdir()
    shown = 'for word; do printf "%s\\n" "$word" >> "$SHOWN"; done; cat > "$SHOWN.input"'
    commands = {"python": shown, "sbatch": "exec bash", "ssh": "exec bash", "srun": 'exec "$@"', "a": "exit 0"}
    for name, body in commands.items():
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (stubs / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}", "SHOWN": str(tmp_path / "shown")}
    subprocess.run(["bash", script], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    words = (tmp_path / "shown").read_text().split("\n")[:-1]
    starts = [i for i, word in enumerate(words) if word == "train.py"]
    assert _flags(words[starts[-1] + 1 :]) == expected


def test_lines_are_counted_through_here_documents(tmp_path: Path) -> None:
    head = "A=1\ncat <<E\none\ntwo\nE\nif a; then B=2; fi\n"
    text = f"{head}sh <<'E'\n\npython train.py --x 5\nE\n(\n\nC='\n'\n)\n[ c ] && D=4\n"
    script = read_script(write(tmp_path, text))
    assert [launch.where for launch in script.launches] == ["launch.sh:9"]
    assert script.conditional == ["launch.sh:6 B=2", "launch.sh:16 D=4"]


def test_a_here_document_that_no_shell_reads_is_pointed_at(tmp_path: Path) -> None:
    script = write(tmp_path, "cat > job.sh <<E\npython train.py --x 5\nE\nsbatch job.sh\n")
    with pytest.raises(InputError, match="starts none of") as caught:
        read_script(script)
    assert "here-document at launch.sh:2" in caught.value.hint


def branches(common: str, one: str, other: str) -> str:
    """A script of continual pre-training that is launched in both branches of an `if`."""
    head, _, tail = cpt_script("1.5b", False).partition("torchrun ")
    first, second = (f"torchrun {tail}".replace("--save", f"{common} {flags} --save").strip() for flags in (one, other))
    return f"{head}if [ -n $DECAY ]; then\n{first}\nelse\n{second}\nfi\n"


def test_launches_in_both_branches_are_taken_where_they_agree(tmp_path: Path) -> None:
    imported = from_script(write(tmp_path, branches("--lr 3e-4", "--seed 5 --eval-iters 7", "--seed 6")))
    assert (imported.size, imported.cpt) == ("1.5b", {"lr": 3e-4})
    assert imported.left["seed"] == "the launches differ in it (5; 6)"
    assert imported.left["eval_iters"] == "the launches differ in it (7; 10)"
    assert any("is started at launch.sh:3" in note and "agree" in note for note in imported.notes)
    same = from_script(write(tmp_path, branches("--lr 3e-4", "", "")))
    assert same.cpt == {"lr": 3e-4} and not any("differ" in reason for reason in same.left.values())


def test_launches_that_differ_in_the_scales_or_in_the_program(tmp_path: Path) -> None:
    text = branches("", "", "").replace("else\ntorchrun", "else\nNVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 torchrun")
    imported = from_script(write(tmp_path, text))
    assert imported.cpt == {} and "NVTE_FP8_BLOCK_SCALING_FP32_SCALES" in imported.left["fp8"]
    with pytest.raises(InputError, match=r"pretrain_gpt.py \(launch.sh:\d+\), train.py \(launch.sh:\d+\)"):
        from_script(write(tmp_path, cpt_script("1.5b", False) + "python train.py --x 1\n"))


def test_what_the_branch_of_the_launch_assigns_is_taken(tmp_path: Path) -> None:
    head, _, tail = cpt_script("7b", True).partition("torchrun ")
    head += 'if [ "$RANK" = 0 ]; then\nSEQ=9\nfi\nif x; then\n  TRAIN+=" --lr 5e-5"\n'
    text = f"{head}  torchrun {tail}\nelse\n  FP8=\nfi\n"
    imported = from_script(write(tmp_path, text))
    assert (imported.size, imported.cpt) == ("7b", {"lr": 5e-5})
    listed = next(note for note in imported.notes if "not carried over" in note)
    assert "SEQ=9" in listed and "FP8=" in listed and "TRAIN" not in listed
    assert any("depends on a condition" in note for note in imported.notes)


def test_a_model_that_depends_on_a_condition_is_pointed_at(tmp_path: Path) -> None:
    text = (
        cpt_script("7b", False)
        .replace("\nMODEL=", "\nif big; then\nMODEL=")
        .replace('\n"\nPARALLEL', '\n"\nfi\nPARALLEL')
    )
    with pytest.raises(InputError, match="nothing says which model") as caught:
        from_script(write(tmp_path, text))
    assert re.match(r"assign launch.sh:\d+ MODEL without a condition", caught.value.hint)


def test_the_environment_of_the_command_counts(tmp_path: Path) -> None:
    text = cpt_script("1.5b", False).replace("torchrun", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 torchrun")
    assert from_script(write(tmp_path, text)).cpt == {"recipe": "infir2-fp32-scales"}


@pytest.mark.parametrize(
    "value", ['"$(touch {CANARY})"', "$(touch {CANARY})", "`touch {CANARY}`", '"${X%y}"', '"$2"', "$HERE/$(date)"]
)
def test_what_only_running_would_tell_is_listed(tmp_path: Path, value: str) -> None:
    text = cpt_script("1.5b", False).replace("--train-iters 40000", f"--train-iters {value} ")
    text = text.replace("--seed 1236", f"--seed {value}").replace("--data-path /data/web", f"--data-path {value}")
    imported = from_script(write(tmp_path, text.replace("--fp8-format e4m3", f"--fp8-format {value}")))
    assert imported.cpt == {} and imported.data == {}
    for name in ("train_iters", "seed", "data_path", "fp8"):
        assert "known only when the script runs" in imported.left[name]
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("value", ['""', "many", "1.5", "nan", "1e999", "$UNSET"])
def test_a_setting_that_is_no_number_is_listed(tmp_path: Path, value: str) -> None:
    text = cpt_script("1.5b", False).replace("--train-iters 40000", f"--train-iters {value} ")
    imported = from_script(write(tmp_path, text))
    assert imported.cpt == {} and "no number that can be taken" in imported.left["train_iters"]


def test_a_vocabulary_that_is_no_padding_is_listed(tmp_path: Path) -> None:
    text = cpt_script("1.5b", False).replace("--vocab-size 152064", "--vocab-size 160000")
    assert "160000" in from_script(write(tmp_path, text)).left["vocab_size"]


def test_defaults_in_braces_are_taken(tmp_path: Path) -> None:
    text = cpt_script("1.5b", False).replace("--seq-length ${SEQ}", "--seq-length ${LENGTH:=4096}")
    imported = from_script(write(tmp_path, text))
    assert imported.cpt == {"seq_len": 4096} and "seq_length" not in imported.left


def test_conditional_assignments_are_listed_and_not_made(tmp_path: Path) -> None:
    lines = (
        'if [ -n "$LONG" ]; then SEQ=65536; fi\nif test x\nthen\n  WARMUP=1\nelse\n  export TRAIN+=" --seed 5"\nfi\n'
        "[ -f x ] && FP8=\nfor i in 1 2; do\n  PARALLEL=$i\ndone\ncase $1 in\n a|b) LOGS=x ;;\nesac\nAFTER=1\n"
    )
    script = write(tmp_path, cpt_script("1.5b", False).replace("torchrun", f"{lines}torchrun"))
    found = read_script(script)
    assert [entry.split(" ", 1)[1] for entry in found.conditional] == [
        'NODES="$2"', 'EXTRA+=("$1")', "SEQ=65536", "WARMUP=1", 'TRAIN+=" --seed 5"', "FP8=", "PARALLEL=$i", "LOGS=x",
    ]  # fmt: skip
    assert found.variables["AFTER"] == "1"
    imported = from_script(script)
    assert imported.cpt == {} and any("launch.sh:" in n and "SEQ=65536" in n for n in imported.notes)


def test_arguments_inside_a_checkpoint(tmp_path: Path) -> None:
    tiny = load_preset("tiny").model
    sizes = {"hidden_size": tiny.hidden, "intermediate_size": tiny.ffn, "num_attention_heads": tiny.heads}
    write_model(tmp_path / "hf", layers=tiny.layers, tied=True, sizes=sizes | {"num_key_value_heads": tiny.kv_heads})
    export_megatron(HFWeights(tmp_path / "hf"), tmp_path / "mc")
    imported = from_checkpoint(tmp_path / "mc")
    assert imported.size == "tiny" and any("infir2 convert to-hf" in note for note in imported.notes)
    assert loaded(tmp_path, imported).model.size == "tiny"


def test_the_command(tmp_path: Path, run_cli: Any) -> None:
    script = write(tmp_path, cpt_script("7b", False))
    done = run_cli("init", "p", "--from-script", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--tensor-model-parallel-size: how it is spread" in done.stdout and "wrote p/infir2.toml" in done.stdout
    assert load_project(tmp_path / "p/infir2.toml").model.size == "7b"
    done = run_cli("init", "q", "--from-script", script, "--json", "--dry-run", cwd=tmp_path)
    assert json.loads(done.stdout)["not_carried_over"]["wandb_project"] and not (tmp_path / "q").exists()
    done = run_cli("init", "q", "--from-script", script, "--from-megatron", "x", cwd=tmp_path)
    assert done.returncode == 2 and "exclude each other" in done.stderr
    done = run_cli("init", "q", "--from-megatron", "x", cwd=tmp_path)
    assert done.returncode == 3 and "there is no such path" in done.stderr
