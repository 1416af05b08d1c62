#!/usr/bin/env bash
# The GPU evidence behind benchmarks/LOG.md, in one go on one H200: GPU tests, 1.5b really training, the parity study.
#   benchmarks/evidence.sh OUT SECONDS     (OUT: folder for results; SECONDS: how long all of it may take)
set -u
out=$1 limit=$2 began=$SECONDS
left() { echo $((limit - (SECONDS - began))); }
site=$(python3 -c 'import transformers, os; print(os.path.dirname(os.path.dirname(transformers.__file__)))')
work=$(mktemp -d)

python3 -m pytest -q tests/gpu -p no:cacheprovider 2>&1 | tail -15 | tee "$out/gpu-tests.txt"
python3 -m infir2_cli data prepare python-stdlib "$site/transformers" "$site/torch" --ext .py --tokenizer byte \
  --limit-mb 120 --out "$work/corpus"

# Killed rather than stopped: the 18 GB checkpoint of a stop would cost more time than the training.
timeout -s KILL 80 python3 -m infir2_cli cpt --size 1.5b --from-scratch --data "$work/corpus" --recipe infir2 \
  --seq-len 8192 --global-batch 1 --micro-batch 1 --steps 1000 --warmup-steps 10 --lr 3e-4 --min-lr 3e-5 --decay-steps 100 \
  --eval-every 20 --eval-iters 2 --save-every 1000 --device cuda --runs "$work/runs" --name big > "$out/1.5b.txt" 2>&1
cat "$out/1.5b.txt"
cp "$work/runs/big/metrics.jsonl" "$out/1.5b.jsonl"

options=(--global-batch 4 --micro-batch 4 --eval-iters 20 --save-every 2000)
minutes() { python3 -c "print(max(0.1, ($(left) - 25) / 60))"; }
study() { python3 benchmarks/parity.py run --data "$work/corpus" --runs "$work/runs" --minutes "$(minutes)" "$@" -- "${options[@]}"; }
study --recipes fp8-static --seeds 1 &
study --recipes bf16 infir2
wait
echo "main arms done, $(left) s left"
if [ "$(left)" -gt 60 ]; then study --recipes fp8-static --seeds 2 3; fi
for file in "$work"/runs/parity-*/metrics.jsonl; do echo "$file $(tail -n 1 "$file" | cut -c1-60)"; done
tar czf "$out/parity-metrics.tgz" -C "$work/runs" $(cd "$work/runs" && ls -d parity-*-s?/metrics.jsonl parity-*-s?/config.toml)
python3 benchmarks/parity.py report --runs "$work/runs" --recipes bf16 infir2 --json "$out/parity.json"
python3 benchmarks/parity.py report --runs "$work/runs" --recipes bf16 fp8-static --seeds 1
