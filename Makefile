# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test lint types unit kernels others clean

train: $(READY)
	$(BIN)/thinwire compare digits --workers 4 --methods dense,topk,adtopk --density 0.01

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Kernels are compiled for the CPU by one core while the other's tests wait for each other.
unit: $(READY)
	$(MAKE) --no-print-directory -j2 --output-sync=line kernels others

kernels: $(READY)
	$(BIN)/python -m pytest tests/kernels

others: $(READY)
	$(BIN)/python -m pytest --ignore=tests/kernels

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info runs
