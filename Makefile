# Two commands to start with: `make demo` and `make test`. Each does its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-gpu check format bench clean

setup: $(STAMP)

# The pinned set comes from constraints.txt; torch goes first so that nothing else chooses its build.
# What tests/vision.py finds lies in a folder of its own: trl does not work beside this torchvision.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade \
		--target $(VENV)/vision timm torchvision vit-pytorch einops
	touch $@

demo: setup
	$(BIN)/depthgate demo

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The tests that need CUDA, in parts of less than nine minutes; `make test-gpu PART=2` runs one of them. Needs no
# set-up: where there is no .venv, the python of the PATH runs them.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
PARTS := 4
PART ?= $(shell seq $(PARTS))

test-gpu:
	$(GPU_PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'no CUDA device here')"
	for part in $(PART); do PYTHONPATH=src:$$PYTHONPATH GPU_PART=$$part/$(PARTS) $(GPU_PYTHON) -m pytest tests/gpu || exit 1; done

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/generate.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
