# Every target sets up what it needs: a fresh clone runs `make demo` or `make test` and nothing else.
VENV   := .venv
PYTHON := $(VENV)/bin/python
PIP    := $(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
READY  := $(VENV)/.ready
# Tests start Python some hundred times: where nothing may be kept, each start compiles the whole package anew, 1.3 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test lint types layers pytest test-rest test-all bits fuzz faults conformance scripts test-browser wheel figures docs clean
help:
	@echo "make demo        train a small GPT on Python's own source with 2 workers, about one minute"
	@echo "make test        lint, types, import layers, quick unit tests and smoke tests: before a commit"
	@echo "make test-rest   exactly the tests that \`make test\` leaves out"
	@echo "make test-browser  the page of \`paceline monitor\` in chromium, where it is installed"
	@echo "make test-all    what CI runs: all three, docs, every 127th of bits, fuzz, conformance"
	@echo "make bits        the full product of workers, lanes, buckets and models: one hash each"
	@echo "make fuzz        random models, optimizers, strategies and workers: the bits of one worker, for SECONDS (60)"
	@echo "make faults      workers killed, stopped and failing in every phase of a step, under every strategy"
	@echo "make conformance PyTorch's tests on the paceline backend, transformers' on the Trainer, accelerate's on the shards"
	@echo "make scripts     other projects' scripts, adapted, on 1, 2 and 3 workers under ddp, zero2 and fsdp: one hash each"
	@echo "make wheel       sdist and wheel in dist/, with the C kernels in it where there is a compiler (hatch_build.py)"
	@echo "make figures     redraw docs/figures from benchmarks/results; MEASURE=1 first measures the README's anew, ten minutes"
	@echo "make docs        the documentation as a site in site/: a broken link or an undocumented public name fails"
	@echo "make clean       remove the virtual environment and run folders"

setup: $(READY)
$(READY): pyproject.toml constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
	@echo "ready: source $(VENV)/bin/activate, then paceline doctor"

demo: setup
	$(VENV)/bin/paceline run --workers 2 examples/train_gpt.py --run-dir runs/demo

test: lint types layers pytest
lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
types: setup
	$(PYTHON) -m mypy
layers: setup
	$(VENV)/bin/lint-imports
# CONTRIBUTING.md has the table of markers. A file runs whole: `.venv/bin/python -m pytest tests/data/test_loader.py`.
QUICK := smoke or (unit and not slow)
pytest: setup
	$(PYTHON) -m pytest -m "$(QUICK)" -n logical --maxprocesses 8 --dist worksteal
# Whole jobs, of which some are killed in time, one after another; what forks workers, and jobs that may, two at a time.
BESIDE := not job or beside
test-rest: setup
	$(PYTHON) -m pytest -m "not ($(QUICK)) and ($(BESIDE)) and not browser" -n 2 --dist worksteal
	$(PYTHON) -m pytest -m "not ($(QUICK)) and not ($(BESIDE))"

# The browser is the system's. Where it is missing, or playwright can't be installed, the tests are skipped and say so.
test-browser: setup
	-$(PIP) --no-build-isolation --editable '.[browser]'
	$(PYTHON) -m pytest -m browser tests/dashboard

test-all: EVERY = 127
test-all: test docs test-rest test-browser bits fuzz conformance

# Of the full product every EVERY-th combination; a prime above 3 meets all values of all its axes.
EVERY ?= 1
bits: setup
	$(PYTHON) -m pytest -m product --full-product --every $(EVERY) -n 2 --dist worksteal tests/bits

# Seeded by the date; another SEED, or `python -m tests.bits.fuzz --help`, for more.
SECONDS ?= 60
fuzz: setup
	$(PYTHON) -m tests.bits.fuzz --seconds $(SECONDS) --jobs 2 $(if $(SEED),--seed $(SEED))

faults: setup
	$(PYTHON) -m pytest tests/faults --full-product --every $(EVERY)
	$(PYTHON) -m pytest tests/strategies/test_teardown*.py tests/parameter_server/test_killed.py \
	  tests/launch/test_network_namespaces.py

# gloo's tests are fetched from GitHub unless PYTORCH is a checkout of the release.
conformance: setup
	$(PYTHON) -m tests.conformance.driver $(if $(PYTORCH),--pytorch $(PYTORCH))
	$(PYTHON) -m tests.conformance.transformers_trainer
	$(PYTHON) -m tests.conformance.accelerate_data_loader

# Nine combinations each; fetched from GitHub, or said to be not run.
scripts: setup
	$(PYTHON) -m tests.conformance.scripts

wheel: setup
	$(PYTHON) -m hatchling build

figures: setup
	$(PYTHON) benchmarks/figures.py $(if $(MEASURE),--measure)

# Offline, once its packages are there. To read it: `.venv/bin/python -m http.server --directory site`.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
$(VENV)/.docs: $(READY)
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) runs site
