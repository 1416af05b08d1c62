#!/usr/bin/env bash
# GPU evidence for benchmarks/LOG.md on one H200, one part a call, each with its own time limit:
#   benchmarks/evidence.sh gpu-tests OUT
#   benchmarks/evidence.sh corpus WORK                      120 MB of Python sources as bytes: WORK/corpus
#   benchmarks/evidence.sh 1.5b WORK OUT SECONDS            needs the corpus
#   benchmarks/evidence.sh parity WORK OUT SECONDS          needs the corpus; on all cards; again to go on where it stopped
# Results go to OUT as they come, so that a call that is cut short loses nothing but its last minute.
set -u
part=$1
work=${2:-} out=${3:-} seconds=${4:-}

case $part in
gpu-tests)
  python3 -m pytest -q tests/gpu tests/unit/test_hopper_kernels.py -p no:cacheprovider 2>&1 | tail -15 | tee "$2/gpu-tests.txt"
  ;;
corpus)
  site=$(python3 -c 'import transformers, os; print(os.path.dirname(os.path.dirname(transformers.__file__)))')
  python3 -m infir2_cli data prepare python-stdlib "$site/transformers" "$site/torch" --ext .py --tokenizer byte \
    --limit-mb 120 --out "$work/corpus"
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
  cards=$(nvidia-smi -L | wc -l)
  study="--data $work/corpus --runs $work/runs --warm 1000 --cards $cards"
  python3 benchmarks/parity.py run $study --minutes "$(python3 -c "print(($seconds - 60) / 60)")" -- --eval-iters 20
  for run in "$work"/runs/parity-*-s?; do echo "$run $(tail -n 1 "$run/metrics.jsonl" | cut -c1-60)"; done
  python3 benchmarks/parity.py swap $study -- --eval-iters 20
  tar czf "$out/parity-metrics.tgz" -C "$work/runs" $(cd "$work/runs" && ls -d */metrics.jsonl)
  python3 benchmarks/parity.py report --runs "$work/runs" --json "$out/parity.json"
  ;;
*)
  echo "benchmarks/evidence.sh: gpu-tests, corpus, 1.5b or parity, not '$part'" >&2
  exit 2
  ;;
esac
