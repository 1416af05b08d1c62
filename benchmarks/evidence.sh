#!/usr/bin/env bash
# GPU evidence for benchmarks/LOG.md on one H200, one part a call, each with its own time limit:
#   benchmarks/evidence.sh gpu-tests OUT
#   benchmarks/evidence.sh corpus WORK                      120 MB of Python sources as bytes: WORK/corpus
#   benchmarks/evidence.sh bpe WORK                         a BPE tokenizer trained on sources, and WORK/bpe by it
#   benchmarks/evidence.sh 1.5b WORK OUT SECONDS            needs the corpus
#   benchmarks/evidence.sh fast-parity WORK OUT SECONDS     1.5b on the fast path, an arm a card; needs bpe
#   benchmarks/evidence.sh fast-continued WORK OUT SECONDS  the same from 300 steps of bf16 in common
#   benchmarks/evidence.sh sft WORK OUT SECONDS             fine-tuning in FP8 against bf16; needs fast-continued
#   benchmarks/evidence.sh fast-small WORK OUT SECONDS      `small` on the fast path, 3 seeds; needs the corpus
#   benchmarks/evidence.sh parity WORK OUT SECONDS          needs the corpus; on all cards; again to go on where it stopped
# Results go to OUT as they come, so that a call that is cut short loses nothing but its last minute.
set -u
part=$1
work=${2:-} out=${3:-} seconds=${4:-}
cards=$(tr ',' '\n' <<< "${CUDA_VISIBLE_DEVICES:-$(nvidia-smi -L)}" | wc -l)

case $part in
gpu-tests)
  python3 -m pytest -q tests/gpu tests/unit/test_hopper_*.py -p no:cacheprovider 2>&1 | tail -15 | tee "$2/gpu-tests.txt"
  ;;
corpus)
  site=$(python3 -c 'import transformers, os; print(os.path.dirname(os.path.dirname(transformers.__file__)))')
  python3 -m infir2_cli data prepare python-stdlib "$site/transformers" "$site/torch" --ext .py --tokenizer byte \
    --limit-mb 120 --out "$work/corpus"
  ;;
bpe)
  stdlib=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
  site=$(python3 -c 'import transformers, os; print(os.path.dirname(os.path.dirname(transformers.__file__)))')
  python3 benchmarks/bpe.py "$work/tokenizer" "$stdlib" "$site/transformers" "$site/torch"
  python3 -m infir2_cli data prepare python-stdlib "$site/transformers" "$site/torch" --ext .py \
    --tokenizer "$work/tokenizer" --out "$work/bpe"
  ;;
fast-parity|fast-continued)
  # 930 steps of 16,384 tokens: 15.2 million. From a common start the arms share cards, one sequence a microbatch.
  warm=0 rows=2
  [ "$part" = fast-continued ] && warm=300 rows=1
  study="--size 1.5b --seeds 1 --recipes infir2 infir2-lean --control-seeds --data $work/bpe --runs $work/runs"
  study="$study --cards $cards --spread --discard --warm $warm"
  python3 benchmarks/parity.py run $study --minutes "$(python3 -c "print(($seconds - 20) / 60)")" -- \
    --seq-len 8192 --global-batch 2 --micro-batch $rows --steps 930 --warmup-steps 50 --decay-steps 200 --lr 3e-4 \
    --min-lr 3e-5 --eval-every 93 --eval-iters 4 --save-every 930
  tar czf "$out/$part.tgz" -C "$work/runs" $(cd "$work/runs" && ls -d */metrics.jsonl parity-logs)
  python3 benchmarks/parity.py report $study --json "$out/$part.json"
  ;;
sft)
  # From the common start of fast-continued: 120 steps of 16 conversations, packed into rows of 32,768 tokens, at a
  # learning rate at which a model of 300 steps learns; held-out loss every 40.
  site=$(python3 -c 'import transformers, os; print(os.path.dirname(os.path.dirname(transformers.__file__)))')
  [ -e "$work/chats.jsonl" ] || python3 benchmarks/sft_pair.py chats "$work/chats.jsonl" "$site/transformers" "$site/torch" \
    --tokenizer "$work/tokenizer"
  timeout "$seconds" python3 benchmarks/sft_pair.py run --runs "$work/sft" -- --size 1.5b --from "$work/runs/start-s1" \
    --tokenizer "$work/tokenizer" --data "$work/chats.jsonl" --global-batch 16 --epochs 3 --save-every 1000 --answers 0 \
    --lr 3e-4 --min-lr 3e-5 --eval-share 0.05
  tar czf "$out/sft.tgz" -C "$work/sft" $(cd "$work/sft" && ls -d */metrics.jsonl *.log)
  python3 benchmarks/sft_pair.py report --runs "$work/sft" --json "$out/sft.json"
  ;;
fast-small)
  study="--data $work/corpus --runs $work/small --warm 1000 --recipes infir2 infir2-lean --control-seeds"
  study="$study --cards $cards"
  python3 benchmarks/parity.py run $study --minutes "$(python3 -c "print(($seconds - 30) / 60)")" -- --eval-iters 20 \
    --save-every 2000
  tar czf "$out/fast-small.tgz" -C "$work/small" $(cd "$work/small" && ls -d */metrics.jsonl parity-logs)
  python3 benchmarks/parity.py report $study --json "$out/fast-small.json"
  ;;
1.5b)
  # Killed rather than stopped: the 18 GB checkpoint of a stop would take longer than the training.
  timeout -s KILL "$seconds" python3 -m infir2_cli cpt --size 1.5b --from-scratch --data "$work/corpus" --recipe infir2 \
    --seq-len 8192 --global-batch 1 --micro-batch 1 --steps 1000 --warmup-steps 10 --lr 3e-4 --min-lr 3e-5 \
    --decay-steps 100 --eval-every 20 --eval-iters 2 --save-every 1000 --device cuda --runs "$work/runs" --name big \
    > "$out/1.5b.txt" 2>&1
  cat "$out/1.5b.txt"
  cp "$work/runs/big/metrics.jsonl" "$out/1.5b.jsonl"
  ;;
parity)
  study="--data $work/corpus --runs $work/runs --warm 1000 --cards $cards"
  python3 benchmarks/parity.py run $study --minutes "$(python3 -c "print(($seconds - 60) / 60)")" -- --eval-iters 20
  for run in "$work"/runs/parity-*-s?; do echo "$run $(tail -n 1 "$run/metrics.jsonl" | cut -c1-60)"; done
  python3 benchmarks/parity.py swap $study -- --eval-iters 20
  tar czf "$out/parity-metrics.tgz" -C "$work/runs" $(cd "$work/runs" && ls -d */metrics.jsonl)
  python3 benchmarks/parity.py report --runs "$work/runs" --json "$out/parity.json"
  ;;
*)
  echo "benchmarks/evidence.sh: gpu-tests, corpus, bpe, 1.5b, fast-parity, fast-continued, sft, fast-small or parity, not '$part'" >&2
  exit 2
  ;;
esac
