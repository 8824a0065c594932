# `make train` and `make test` need nothing but Python >= 3.10: each makes $(VENV), installs the versions in
# requirements.lock and runs. The install happens once, and again when the lock or pyproject.toml changes.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Test processes: one a core, eight at most. `make test ARGS="-n 0"` runs in one process (for pdb).
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
UV_VERSION := 0.13.9
TORCH_VERSION := 2.13.0

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK_VENV := .venv-lock

.PHONY: help train test lint format lock clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  make train ARGS="algo=ppo_continuous_action env.id=HalfCheetah-v4"'
	@echo '  make test  ARGS="tests/test_returns.py -k gae"'
	@echo '  PYTHON=python3.12 chooses the interpreter that $(VENV) is made with'

train: $(STAMP)  ## Train: python launch.py $(ARGS)
	@$(BIN)/python launch.py $(ARGS)

# The processes share the cores, so each gets one thread.
test: export OMP_NUM_THREADS := 1
test: $(STAMP)  ## Run the tests: pytest $(ARGS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(STAMP)  ## Check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)  ## Apply the formatter and the safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Editable, because conf/ is read from the repository; built with the lock's setuptools.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is too old: Python >= 3.10 is needed, for example make PYTHON=python3.12 …" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# uv reads metadata only: no torch build is downloaded. The packages that torch's Linux wheels bring along for
# CUDA are left out: they follow from the torch wheel that is installed, and a CPU wheel wants none of them.
lock:  ## Resolve requirements.lock anew (newest versions that pyproject.toml allows)
	@test -x $(LOCK_VENV)/bin/uv || $(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@{ \
		echo '# Exact versions of everything: the core, every extra and the development tools.'; \
		echo '# For Python 3.10 to 3.13 on Linux (x86_64; aarch64 without Box2D) and macOS 14 (arm64). Made by: make lock'; \
	} > requirements.lock.new
	echo 'torch==$(TORCH_VERSION)' | $(LOCK_VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 \
		--no-header --no-annotate --all-extras --no-emit-package rl --constraints - pyproject.toml \
		| grep -Ev '^(nvidia|cuda|triton)([-=]|$$)' >> requirements.lock.new
	@mv requirements.lock.new requirements.lock

clean:  ## Remove the virtual environments and caches (never runs/)
	rm -rf $(VENV) $(LOCK_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
