# Every target sets up what it needs; a second run finds it done. Variables: VENV, PYTHON, CONSTRAINTS, JOBS.
SHELL := /bin/bash
.SHELLFLAGS := -u -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# Without an NVIDIA GPU the tested set of versions is installed; with one, torch comes as the machine wants it.
CONSTRAINTS ?= -c constraints/tools.txt $(if $(shell command -v nvidia-smi),,-c constraints/cpu.txt)
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))

NOT_IMPORTED := transformers/models|/tests?/|/torch/(_inductor|_dynamo|testing|distributed|onnx|ao)/$(\
)|/(pip|setuptools|networkx|mypyc|huggingface_hub|pygments)/

.PHONY: help setup demo test lint typecheck unit test-gpu bench measure wheel format clean

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make the virtual environment and install everything (two to three minutes, once).

$(STAMP): pyproject.toml $(wildcard constraints/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit("echo-batch needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.12 or so" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: install python3-venv (Debian, Ubuntu)" >&2; rm -rf $(VENV); exit 1; }
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(CONSTRAINTS) -e '.[dev]'
	@# pip compiles one file after the other. Not all files compile: some are templates; and not all are imported.
	@$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_IMPORTED)' $(VENV)/lib || true
	@touch $@

demo: $(STAMP) ## Answer the questions of examples/demo.parquet with the bundled model and show the answers.
	@mkdir -p out
	@$(BIN)/echo-batch run examples/demo.parquet -o out/demo.parquet --model demo --temperature 0 --restart; \
	code=$$?; if [ $$code -eq 0 ] || [ $$code -eq 10 ]; then $(BIN)/python examples/show_answers.py out/demo.parquet || code=10; fi; \
	exit $$code

test: $(STAMP) ## Lint, types, import rules and tests, as CI runs them.
	@$(MAKE) --no-print-directory -j 2 --output-sync lint typecheck
	@$(MAKE) --no-print-directory unit

lint: $(STAMP) ## ruff and import-linter.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

typecheck: $(STAMP) ## mypy.
	$(BIN)/mypy

# One thread per process: the tests are spread over processes instead.
unit: $(STAMP) ## pytest without what needs a GPU or measures time.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal -q

# Side by side: most of their time is compiling and launching, not the GPU's.
test-gpu: $(STAMP) ## The tests that need an NVIDIA GPU.
	OMP_NUM_THREADS=1 $(BIN)/pytest -m gpu -n $(JOBS) --dist worksteal -q

bench: $(STAMP) ## The measurements (on whatever machine this is).
	$(BIN)/pytest -m bench -q -s

measure: $(STAMP) ## The GPU tests and the GPU numbers of docs/benchmarks.md, into out/measure (needs an NVIDIA GPU).
	$(BIN)/python -m tools.measure out/measure

wheel: $(STAMP) ## Build dist/*.whl.
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist

format: $(STAMP) ## Let ruff format and fix what it can.
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean: ## Remove everything that the other targets made.
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
