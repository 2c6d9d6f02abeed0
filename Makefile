PYTHON ?= python3

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: demo test quick soak lint types docs bench house clean

demo: $(STAMP)
	$(BIN)/encoder-cg demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

# What a change needs first: all tests but those marked `slow` and those of a GPU.
quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile -m "not slow and not soak" --ignore tests/gpu

# Ten thousand requests to the connector, with every fault that can be injected.
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak -s tests/connector

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

# Size, imports, call stacks and private APIs, each with its goal.
house: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tools $(BIN)/python -m house

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev,cli]'
	touch $@
