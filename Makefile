# Two commands do everything on a fresh machine: `make train` and `make test`. While you work, `make quick`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train quick test slow lint types core library others faults docs clean

train: $(READY)
	$(BIN)/thinwire compare digits --workers 4 --methods dense,topk,adtopk --density 0.01 --link auto --target 0.95

# Lint, types and the tests of the core: under 2 minutes on 2 cores.
quick: $(READY)
	$(MAKE) --no-print-directory -j2 --output-sync=target lint types core

# Everything but the exhaustive grids: under 12 minutes on 2 cores. Tests of many processes wait for each other, so two sessions share the cores.
test: $(READY)
	$(MAKE) --no-print-directory -j2 --output-sync=line lint types library others

# The grids: every combination of what `make test` runs a few of.
slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# What every change of the library can break, without many processes and without a compiler.
CORE := $(addprefix tests/,contracts engine exchange memory observe plan select wire test_layout.py test_public.py test_rooms.py)

# Two sessions share the cores: a process of theirs that takes both waits for the other one's.
core library others slow: export OMP_NUM_THREADS := 1

core: $(READY)
	$(BIN)/python -m pytest -m 'not slow and not workers' $(CORE)

# About half of the time of all tests.
LIBRARY := $(addprefix tests/,contracts engine exchange kernels memory methods observe optim plan select wire)

library: $(READY)
	$(BIN)/python -m pytest $(LIBRARY)

others: $(READY)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(LIBRARY))

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), with torch: a minute or more."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Kills, damage and full disks by the hundred; a quarter to half an hour. Not part of `make test`.
faults: $(READY)
	$(BIN)/python benchmarks/fault_campaign.py

# The site, into site/; a broken link or anchor fails.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build *.egg-info runs site
