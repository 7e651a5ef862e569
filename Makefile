# Two commands to start with: `make demo` and `make test`. Each does its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
STAMP := $(VENV)/.installed
# Files are compiled when they are first imported: most of torch never is, and the folder stays below 1 GB.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt

# Ctrl-C: what was installed stays.
GOES_ON := trap 'echo "depthgate: interrupted; the same command goes on" >&2; exit 130' INT;

.PHONY: setup demo test test-gpu check format bench clean

setup: $(STAMP)

# What depthgate itself needs: torch, first, so that nothing else chooses its build, and small packages; hatchling builds
# depthgate here, and not twice in an environment of its own. One that was interrupted while it was made has no pip, and
# is completed.
$(BASE): pyproject.toml constraints.txt
	@echo "depthgate: installing torch and a few small packages into $(VENV)"
	@$(GOES_ON) $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(GOES_ON) $(PIP) torch hatchling editables
	@$(GOES_ON) $(PIP) --no-build-isolation -e .
	@touch $@

# What the tests need on top. What tests/vision.py finds lies in a folder of its own: trl does not work beside this
# torchvision.
$(STAMP): $(BASE)
	@echo "depthgate: installing what the tests need into $(VENV)"
	@$(GOES_ON) $(PIP) --no-build-isolation -e ".[dev]"
	@$(PIP) --no-deps --upgrade --target $(VENV)/vision timm torchvision vit-pytorch einops
	@touch $@

demo: $(BASE)
	@$(BIN)/depthgate demo
	@echo "\`. $(BIN)/activate\` puts depthgate on the PATH; \`depthgate --help\` lists what it does"

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
	$(BIN)/python benchmarks/engine.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
