PYTHON ?= python3

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM  := .venv-vllm
RAY   := .venv-ray

.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: demo test test-all test-vllm test-ray quick soak lint types docs bench house clean

demo: $(STAMP)
	$(BIN)/encoder-cg demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

# With the cases that `test` leaves out, for the sake of machines with few cores.
test-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 16 --dist loadfile -m "not soak"

# vLLM's own classes, in an environment of their own: 0.32.0, and the Python code of 0.31.0 and 0.33.0 over it.
test-vllm: $(VLLM)/.installed
	cd tests/vllm && OMP_NUM_THREADS=1 PYTHONPATH=site:../.. ../../$(VLLM)/bin/pytest -n 2 --dist loadscope
	for version in 0.31.0 0.33.0; do \
		(cd tests/vllm && OMP_NUM_THREADS=1 PYTHONPATH=../../$(VLLM)/vllm-$$version:site:../.. \
			../../$(VLLM)/bin/pytest -n 2 --dist loadscope test_plugin.py test_classes.py test_reloads.py) || exit 1; \
	done

# Ray's own classes, clusters of this machine and a service on one, in an environment of their own.
test-ray: $(RAY)/.installed
	OMP_NUM_THREADS=1 $(RAY)/bin/pytest tests/service

# What a change needs first: all tests but those marked `slow` and those of a GPU.
quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile -m "not slow and not exhaustive and not soak" --ignore tests/gpu

# Ten thousand requests to the connector, with every fault that can be injected, and five to the service.
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak -s tests/connector tests/service

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

# The pages and the API reference as a site; a warning is an error.
docs: $(STAMP)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py encoder --quick

# Size, imports, call stacks and order against the ledger tests/house.toml; better figures are written down.
house: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.house --write

clean:
	rm -rf $(VENV) $(VLLM) $(RAY) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev,cli]'
	touch $@

$(VLLM)/.installed: tests/vllm/install.sh tests/vllm/constraints.txt
	PYTHON=$(PYTHON) bash tests/vllm/install.sh $(VLLM)
	touch $@

# torch first, so that a wheel for CPUs that pip finds locally is not passed over for one with CUDA.
$(RAY)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --disable-pip-version-check -c constraints.txt torch
	$(RAY)/bin/pip install --disable-pip-version-check -c constraints.txt -e '.[dev,cli,ray]'
	touch $@
