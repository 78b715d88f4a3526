# Every command that a person needs. `make` alone lists them.
#   TORCH=torch==2.13.0     the torch to install (default: any from 2.9 on)
#   TORCH_INDEX=<address>   an index to take torch from, such as PyTorch's CPU wheels

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
TORCH_INDEX ?=
ARGS ?=
RESULTS ?= benchmarks/results

BIN := $(VENV)/bin
PY := $(BIN)/python
RUNTIME := $(VENV)/.stamp-runtime
DEV := $(VENV)/.stamp-dev
INSTALL := $(PYTHON) -m tools.install --venv $(VENV) --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)"

.DEFAULT_GOAL := help
.PHONY: help install demo test book run-book docs lab test-gpu soak bench-cpu bench-gpu lint format hooks clean

help:  ## list these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

$(RUNTIME): pyproject.toml
	@$(INSTALL)

$(DEV): pyproject.toml
	@$(INSTALL) --extra dev

install: $(DEV)  ## make .venv with the package and the development tools

demo: $(RUNTIME)  ## install, fetch a small model once, answer three prompts together
	@$(BIN)/octavo demo $(ARGS)

test: $(DEV)  ## run every check that CI runs (ARGS go to pytest)
	@$(PY) -m tools.check $(ARGS)

book: $(DEV)  ## chapters/ to nbs/ to src/octavo/, after you edited a chapter
	@$(PY) -m tools.book

run-book: $(DEV)  ## the same, then run the notebooks whose code changed (ARGS=--all: every one)
	@$(PY) -m tools.book --execute $(ARGS)

docs: $(DEV)  ## build the site into build/site/html; a warning is an error
	@$(PY) -m tools.site

lab: $(DEV)  ## open Jupyter with each chapter's text and notebook paired
	@$(BIN)/jupyter lab $(ARGS)

test-gpu: $(DEV)  ## the tests and notebook cells that need a CUDA card
	@$(PY) -m pytest -m gpu $(ARGS) || [ $$? -eq 5 ]
	@$(PY) -m tools.notebooks gpu

soak: $(DEV)  ## the tests and notebook cells that run for minutes
	@$(PY) -m pytest -m soak $(ARGS) || [ $$? -eq 5 ]
	@$(PY) -m tools.notebooks soak

bench-cpu: $(DEV)  ## Octavo beside transformers on this CPU (10 minutes or more; ARGS="--dtype float32")
	@$(PY) benchmarks/cpu.py $(ARGS)

bench-gpu: $(RUNTIME)  ## octavo bench on this card, records in benchmarks/results/<device>/ (ARGS go to each)
	@$(BIN)/octavo bench throughput --device cuda --model qwen3-0.6b-shape --max-num-batched-tokens 16384 --out $(RESULTS) $(ARGS)
	@$(BIN)/octavo bench latency --device cuda --model qwen3-0.6b-shape --out $(RESULTS) $(ARGS)
	@$(BIN)/octavo bench latency --device cuda --model llama-3.1-8b-shape --out $(RESULTS) $(ARGS)
	@$(BIN)/octavo bench kernels --device cuda --model qwen3-0.6b-shape --out $(RESULTS) $(ARGS)

lint: $(DEV)  ## ruff, mypy and spelling; runs no code of the book
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet .
	@$(PY) -m tools.cellstyle check
	@$(PY) -m mypy
	@$(PY) -m tools.gates spelling

format: $(DEV)  ## let ruff format the chapters' cells, the tests and the tools
	@$(PY) -m ruff check --fix --quiet tools tests docs
	@$(PY) -m ruff format --quiet tools tests docs
	@$(PY) -m tools.cellstyle format

hooks: $(DEV)  ## check text, notebooks and package before every commit
	@$(BIN)/pre-commit install

clean:  ## remove what the commands above made, but not nbs/ and src/octavo/
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
