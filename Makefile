# One-word commands; `make help` lists them. Every target first brings .venv up to date, which costs a second when
# nothing changed. The system needs make, g++ and Python 3.11 to 3.13 with headers; everything else comes from package
# indexes. torch's CPU build is taken from where pip is configured to look, else from PyTorch's own index,
# https://download.pytorch.org/whl/cpu (never a CUDA build).

SHELL := /bin/bash
.DEFAULT_GOAL := help

BOOTSTRAP ?= python3
SETUP := $(BOOTSTRAP) tools/setup_env.py
BIN := .venv/bin
PYTHON_SOURCES := vllm_llmdd_connector examples tests benchmarks tools
NATIVE_SOURCES = $(shell find csrc tests/native -name '*.cpp' -o -name '*.h' 2>/dev/null)
PYTEST_ARGS ?=
# Two files of tests at a time, real servers alone: see tests/conftest.py.
SIDE_BY_SIDE := -n 2 --dist loadscope --no-loadscope-reorder
DEMO_ARGS ?=
# --quick, --only NAME,...: see benchmarks/record.py.
BENCH_ARGS ?=
CHAOS_REQUESTS ?= 20000
CHAOS_SEED ?= 1
FUZZ_SECONDS ?= 300
SOAK_MINUTES ?= 30

.PHONY: help setup setup-tests demo test test-fast test-slow test-nixl lint format asan tsan fuzz chaos cycles chaos-engine chaos-servers soak bench clean distclean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: ## .venv with vLLM's CPU build and this project (first time: 3 min, 0.7 GB fetched; later: 1 s)
	@$(SETUP) env project

setup-tests: ## the same, with the model, NIXL and the oldest supported vLLM's Python files (1 min more)
	@$(SETUP) env project model vllm23 bench

demo: ## two vLLM servers and a proxy on this machine, checked prompt by prompt (3 min once set up)
	@$(SETUP) env project model
	@$(BIN)/python examples/disaggregated_prefill/demo.py $(DEMO_ARGS)

test: setup-tests ## the tests, real servers included (20 min)
	@$(BIN)/python -m pytest tests -m "not slow" $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-slow: setup-tests ## faults of real servers while P pushes, decode first, and servers that stop (13 min)
	@$(BIN)/python -m pytest tests/e2e -m slow $(PYTEST_ARGS)

test-fast: setup-tests ## every test that starts no vLLM server (10 min)
	@$(BIN)/python -m pytest tests -m "not e2e and not slow" $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-nixl: setup-tests ## the API's contract over NIXL, network namespaces (root), real servers (6 min)
	@$(BIN)/python -m pytest tests/contract --transport nixl $(PYTEST_ARGS)
	@$(BIN)/python -m pytest tests/integration/test_netns.py tests/e2e/test_nixl.py $(PYTEST_ARGS)

lint: ## ruff, mypy --strict, clang-format, all read-only
	@$(SETUP) env project
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/mypy
	MYPYPATH=examples/disaggregated_prefill $(BIN)/mypy examples/disaggregated_prefill/*.py
	MYPYPATH=tools $(BIN)/mypy tools/setup_env.py tools/state_tables.py
	@if [ -n "$(NATIVE_SOURCES)" ]; then \
	  echo "clang-format --dry-run -Werror csrc tests/native"; \
	  $(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES); fi

format: ## rewrite the sources in the project's format
	@$(SETUP) env
	$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	@[ -z "$(NATIVE_SOURCES)" ] || $(BIN)/clang-format -i $(NATIVE_SOURCES)

asan: ## mutated inputs, then the native tests, under AddressSanitizer and UBSan (6 min)
	@$(SETUP) env project
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(CURDIR)/$(BIN)/python tests/native/run_sanitized.py

tsan: ## threads of the engine against each other under ThreadSanitizer (1 min)
	@$(SETUP) env project
	@$(BIN)/python tests/native/run_races.py

fuzz: ## new random inputs for FUZZ_SECONDS: mutated messages under ASan, calls and events against models (5 min)
	@$(SETUP) env project
	@$(BIN)/python tests/native/run_fuzz.py $(FUZZ_SECONDS)

chaos: ## CHAOS_REQUESTS from CHAOS_SEED through simulated P's and D's that are killed, cut off, ... (2 min)
	@$(SETUP) env project
	@$(BIN)/python tests/chaos/run.py --requests $(CHAOS_REQUESTS) --seed $(CHAOS_SEED)

cycles: ## 10,000 times allocate, link, pull, unlink, free, in both generations: nothing may be left (2 min)
	@$(SETUP) env project
	@LLMDD_CYCLES=10000 $(BIN)/python -m pytest -q --timeout 1800 tests/contract/test_cycles.py

chaos-engine: ## engine and control plane under kills, stops, lost messages and aborts, without vLLM's engine (3 min)
	@$(SETUP) env project
	@$(BIN)/python tests/stress/chaos_engine.py

chaos-servers: ## real servers killed, stopped and restarted under load: right answers or clean errors (7 min)
	@$(SETUP) env project model
	@$(BIN)/python tests/stress/chaos_servers.py

soak: ## real servers under load for SOAK_MINUTES: nothing may grow (30 min); a plot in .cache/soak.png
	@$(SETUP) env project model
	@$(BIN)/python tests/stress/soak.py --minutes $(SOAK_MINUTES) --plot .cache/soak.png

bench: ## every benchmark, recorded in benchmarks/results and drawn in docs/performance.md (70 min on two idle cores)
	@$(SETUP) env project model bench
	@$(BIN)/python benchmarks/record.py $(BENCH_ARGS)

clean: ## remove build products and caches of tools; keeps .venv and .cache
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -not -path './.cache/*' -prune -exec rm -rf {} +

distclean: clean ## the same, with .venv, the model and everything fetched
	rm -rf .venv .cache
