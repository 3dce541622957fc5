# Every target makes or refreshes .venv first (scripts/setup.sh; seconds when it is up to date).
SHELL := bash
BIN := .venv/bin
PYTEST_ARGS ?= -n 2 --dist worksteal
SEEDS ?= 500
V2_SEEDS ?= 10
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types unit fuzz wheel format bench aot aot-jax conformance clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: ## make .venv: everything the other targets need
	@bash scripts/setup.sh

demo: setup ## the main job on a real model: table, same-bytes check, report.html (ARGS="--help" for its options)
	$(BIN)/vtoken demo $(ARGS)

test: lint types unit wheel ## all checks: lint, types, tests, wheel contents

lint: setup ## ruff (rules and format) and the import direction
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

types: setup ## mypy --strict
	$(BIN)/mypy

unit: setup ## pytest alone (PYTEST_ARGS="shared/tests -k table" to choose)
	$(BIN)/pytest $(PYTEST_ARGS)

fuzz: setup ## 500 random vLLM engines, every token checked (a quarter of an hour on two free cores; SEEDS=2000, V2_SEEDS=50 for more)
	VTOKEN_FUZZ_SEEDS=$(SEEDS) VTOKEN_V2_FUZZ_SEEDS=$(V2_SEEDS) $(BIN)/pytest $(PYTEST_ARGS) -rP \
		torch_impl/tests/vllm_plugin/test_fuzz.py torch_impl/tests/vllm_plugin/test_runner_v2.py

wheel: setup ## build the wheel and check what is in it
	$(BIN)/python scripts/check_wheel.py

format: setup ## put the code into shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup ## the costs of the core, one table
	$(BIN)/vtoken bench spec $(ARGS)

aot: setup aot-jax ## compile the Triton kernels for three generations of cards, judge the code, keep the record (needs no card)
	$(BIN)/vtoken bench kernels --json bench/results/kernels_aot.json $(ARGS)

aot-jax: ## compile the JAX kernels and steps for an H100, in .venv-aot on the newest JAX, with its tests (needs no card)
	@bash scripts/aot_jax.sh --json bench/results/jax_aot.json $(ARGS)

conformance: setup ## three executors against the brute-force model
	$(BIN)/vtoken conformance --executor reference --executor torch --executor jax $(ARGS)

clean: ## remove .venv and everything built
	rm -rf .venv .venv-aot dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
