# make demo       corpus, two short runs (bf16, infir2), a picture of both loss curves: demo.png
# make demo-sft   the run of `demo` fine-tuned in two stages on questions about Python functions, and what it answers
# make test       the test suite
# make lint       ruff and mypy
# make soak       kills a run at least 200 times and counts what was lost
# Every target makes the environment in .venv by itself. PYTHON and VENV may be given: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: demo demo-sft test lint soak env clean

env: $(STAMP)

# A machine with a GPU and a CUDA build of torch keeps that build: the environment sees the system's packages, and the
# pinned torch, and the triton that belongs to a torch, are left out of the constraints. Everywhere else torch comes
# first, at its pinned version.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "infir2 needs Python 3.11 or newer: make PYTHON=python3.11"; exit 4; }
	@if command -v nvidia-smi >/dev/null && $(PYTHON) -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; then \
		set -ex; $(PYTHON) -m venv --system-site-packages $(VENV); \
		grep -vE '^(torch|triton)==' constraints.txt > $(VENV)/constraints.txt; \
	else \
		set -ex; $(PYTHON) -m venv $(VENV); cp constraints.txt $(VENV)/constraints.txt; \
		$(BIN)/python -m pip install -q $$(grep '^torch==' constraints.txt) -c $(VENV)/constraints.txt; \
	fi
	$(BIN)/python -m pip install -q -e '.[dev]' -c $(VENV)/constraints.txt
	@touch $@

demo: $(STAMP)
	$(BIN)/infir2 data prepare python-stdlib --out data/stdlib --tokenizer byte
	$(BIN)/infir2 cpt --size tiny --data data/stdlib --recipe bf16 --name demo-bf16
	$(BIN)/infir2 cpt --size tiny --data data/stdlib --recipe infir2 --name demo-infir2
	$(BIN)/infir2 runs compare demo-bf16 demo-infir2 --png demo.png

demo-sft: $(STAMP)
	$(BIN)/infir2 data prepare python-stdlib --out data/stdlib --tokenizer byte
	$(BIN)/infir2 cpt --size tiny --data data/stdlib --recipe infir2 --name demo-infir2
	$(BIN)/infir2 data chat-demo --out data/chat.jsonl --limit 3000
	$(BIN)/infir2 sft --stage 1 --size tiny --from demo-infir2 --data data/chat.jsonl --epochs 1 --eval-every 100 --name demo-sft-1
	$(BIN)/infir2 sft --stage 2 --size tiny --from demo-sft-1 --data data/chat.jsonl --epochs 1 --eval-every 100 --name demo-sft-2
	$(BIN)/infir2 runs compare demo-sft-1 demo-sft-2 --png demo-sft.png
	$(BIN)/python benchmarks/demo_sft.py runs/demo-sft-1 runs/demo-sft-2

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: $(STAMP)
	$(BIN)/python -m pytest -q -s --slow -m slow tests/e2e

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
