# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test lint types unit numbers others clean

train: $(READY)
	$(BIN)/thinwire compare digits --workers 4 --methods dense,topk,adtopk --density 0.01

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# These keep one core busy, compiling kernels for the CPU above all, while the tests of many processes wait for each other.
NUMBERS := tests/kernels tests/lowrank tests/select

unit: $(READY)
	$(MAKE) --no-print-directory -j2 --output-sync=line numbers others

numbers: $(READY)
	$(BIN)/python -m pytest $(NUMBERS)

others: $(READY)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(NUMBERS))

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info runs
