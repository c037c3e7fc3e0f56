# make serve      a model on http://127.0.0.1:8000
# make test       every check that needs no root and no system package
# make test-long  the others: minutes, and system packages (Debian: prometheus); what is missing is skipped and named
#
# PYTHON=python3.12   another interpreter (3.11 or newer)
# PIP_ARGS="..."      options for pip, such as an index with PyTorch's CPU build
# ARGS="..."          options and model for `pellucid serve`

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
ARGS ?=
BIN := $(VENV)/bin
# The package is installed in place: only these make a new installation necessary, Python sources do not.
BUILD_INPUTS := pyproject.toml constraints.txt $(wildcard CMakeLists.txt) $(wildcard csrc/*)

.PHONY: serve test test-long test-sanitized lint format types model golden docs clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed
	$(BIN)/pellucid serve $(ARGS)

test: $(VENV)/.installed-test lint types model
	$(BIN)/python -m pytest -q

test-long: $(VENV)/.installed-test model test-sanitized
	$(BIN)/python -m pytest -q -m long

# The native kernels' tests once more, on a build that notices bad addresses and undefined behaviour.
test-sanitized: $(VENV)/.installed-test
	$(BIN)/python -m tests.kernels.sanitized

lint: $(VENV)/.installed-test
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix src tests examples benchmarks
	$(BIN)/ruff format src tests examples benchmarks

types: $(VENV)/.installed-test
	$(BIN)/mypy

# Tests with the real model skip, and say so, where it cannot be had.
model: $(VENV)/.installed
	-$(BIN)/pellucid fetch

# Decide the golden traces anew, after a change to scheduling that is meant; the diff is the review.
golden: $(VENV)/.installed-test
	PYTHONPATH=src:. $(BIN)/python -m tests.core.test_input_log
	git diff --stat tests/core/golden

docs: $(VENV)/.installed-test
	$(BIN)/python -m tests.cli.test_help
	$(BIN)/python -m tests.telemetry.test_metrics_page

clean:
	rm -rf $(VENV) build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(f"Python {sys.version.split()[0]} is too old: 3.11 or newer is needed; make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(BUILD_INPUTS)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/bin/python $(BUILD_INPUTS)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[test]'
	@touch $(VENV)/.installed $@
