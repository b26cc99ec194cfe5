# Each target sets up what it needs; nothing but Python 3.11 and a package index is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Data sets are found through MBPA_DATA; a copy beside the checkout is used if there is one.
export MBPA_DATA ?= $(wildcard $(abspath ../shared/data))
# Packages are compiled when they are first imported (half of them never are), and that is kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo report docs test check bench clean

help:
	@echo "make demo    a network meets digits it was not trained on: table, figure, explanation"
	@echo "make report  one page of all results, drawn from results/"
	@echo "make docs    bring tables and figures in the documents up to date with results/"
	@echo "make test    formatting, types and all tests"
	@echo "make check   formatting and types alone"
	@echo "make bench   how fast the engine is, against a loop, torch.func and the hardware"
	@echo "make clean   remove what the other targets made"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/mbpa demo

report: $(READY)
	$(BIN)/mbpa report results --out report

docs: $(READY)
	$(BIN)/mbpa report results --documents README.md docs/*.md
	$(BIN)/python -m benchmarks.report

bench: $(READY)
	$(BIN)/python -m benchmarks --curves

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest -n auto

clean:
	rm -rf $(VENV) build dist demo report .mypy_cache .ruff_cache .pytest_cache .hypothesis
