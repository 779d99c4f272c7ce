# pd-relay: `make demo` to see it, `make test` to check it. Every target may be run twice.
#
#   PYTHON=python3.12 make setup          another interpreter (3.11 or newer)
#   TORCH_PIP_ARGS="--index-url URL"      where pip takes torch from: PyTorch's own index of CPU wheels saves the
#                                         download of its CUDA libraries (README.md, Installing)
#   PYTEST_ARGS="-k handoff -x"           more arguments for pytest
#   LAB_DRILLS="kill-host cut-host"       those of make lab; its report has them alone then
#   PYTEST_WORKERS=1                      test files at once; 0: in pytest's own process, for a debugger

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2
LAB_DRILLS ?= all
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread a process: two processes with a thread for each core take turns at spinning, ten times as slow.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

NATIVE_SOURCES := $(wildcard setup.py) kernels/pd_kernels/build.py $(shell find kernels -name '*.cpp' -o -name '*.h')

.PHONY: help setup demo check check-types check-others test gate lab protos docs clean

help:
	@echo "make setup         the virtual environment $(VENV), with everything in it"
	@echo "make demo          setup, then a request through a router and two workers, compared with one process"
	@echo "make test          setup, check, and all tests but the slow ones"
	@echo "make check         lint, types, import layers, generated files"
	@echo "make gate          everything, slow tests included, with a report in docs/gate.md"
	@echo "make lab           hosts on this machine (needs root), every drill on them, with a report in docs/benchmarks/lab.md"
	@echo "make protos        write the Python files of the .proto files again"
	@echo "make docs          write docs/settings.md and docs/commands.md again"
	@echo "make clean         remove what was built, the virtual environment included"

setup:
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/.installed

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "pd-relay needs Python 3.11 or newer; name one: make setup PYTHON=..." >&2; exit 2; }
	@echo "setup 1/3: $$($(PYTHON) --version) in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
		echo "python's venv module does not work here (Debian: install the package python3-venv)" >&2; exit 2; }
	@touch $@

$(VENV)/.torch-$(TORCH_VERSION): $(VENV)/.created
	@echo "setup 2/3: torch $(TORCH_VERSION), and the compiled ops (a minute or more)"
	@$(PIP) install -qq $(TORCH_PIP_ARGS) torch==$(TORCH_VERSION)
	@touch $@

# Beside torch, which is waited for. What fails here is tried again, and said, when pd-relay is installed.
$(VENV)/.ops: $(VENV)/.created $(NATIVE_SOURCES)
	@PYTHONPATH=kernels $(BIN)/python -m pd_kernels.build > /dev/null 2>&1 || true
	@touch $@

# A build of torch for CUDA names its own Triton, which is kept then.
$(VENV)/.installed: $(VENV)/.torch-$(TORCH_VERSION) $(VENV)/.ops pyproject.toml constraints.txt $(NATIVE_SOURCES)
	@echo "setup 3/3: pd-relay and its dependencies (a minute or more)"
	@torch=$$($(PIP) show torch) || { echo "pip show torch fails in $(VENV)" >&2; exit 2; }; \
		if echo "$$torch" | grep '^Requires:.*triton' > /dev/null; then sed '/^triton==/d' constraints.txt; \
		else cat constraints.txt; fi > $(VENV)/constraints.txt
	@$(PIP) install -qq -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@
	@echo "setup: done; . $(BIN)/activate, then pd-relay --help"

demo: setup
	@$(BIN)/pd-relay demo

check: setup
	@$(MAKE) --no-print-directory --jobs=2 check-types check-others

check-types:
	@echo "check: mypy --strict"
	@$(BIN)/mypy --no-error-summary

check-others:
	@echo "check: ruff"
	@$(BIN)/ruff check --quiet .
	@echo "check: import layers"
	@report=$$($(BIN)/lint-imports --no-logo --no-cache) || { echo "$$report" >&2; exit 1; }
	@echo "check: generated files"
	@$(BIN)/python -m pd_ops.protos --check
	@$(BIN)/python -m pd_ops.settings_doc --check
	@$(BIN)/python -m pd_ops.commands_doc --check

# Tests start Python some hundred times: what is compiled once is kept, whatever the environment says.
test gate: export PYTHONDONTWRITEBYTECODE =

test: check
	@$(BIN)/python -m pytest -m "not slow" -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=1 $(PYTEST_ARGS)

gate: check
	@$(BIN)/python -m pd_ops.gate --report docs/gate.md

lab: setup
	@cd tests && ../$(BIN)/python -m support.lab_report ../docs/benchmarks/lab.md $(LAB_DRILLS)

protos: setup
	@$(BIN)/python -m pd_ops.protos

docs: setup
	@$(BIN)/python -m pd_ops.settings_doc
	@$(BIN)/python -m pd_ops.commands_doc

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name '*.so' \) -print0 | xargs -0 rm -rf
