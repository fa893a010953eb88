# The two commands of the README, each doing its own set-up: `make check` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SHELL  := /bin/bash
.DEFAULT_GOAL := help

# dependency-groups are installed by pip itself (25.1 and newer); a stamp keeps re-runs from reinstalling.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'

$(VENV)/.stamp-base: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.stamp-%: pyproject.toml $(VENV)/.stamp-base
	$(BIN)/python -m pip install --quiet --group $*
	touch $@

.PHONY: help check test test-frameworks lint format wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

check: $(VENV)/.stamp-base  ## the main job: real attention against the fp64 oracle, on the CPU path and on every GPU kernel
	$(BIN)/cupyflash check

test: $(VENV)/.stamp-test  ## the test-suite (what needs a GPU or a framework that is absent is skipped, with the reason)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-frameworks: $(VENV)/.stamp-test $(VENV)/.stamp-frameworks  ## the adapters' tests, with the CPU builds of torch and JAX
	$(BIN)/python -m pytest -n auto --dist worksteal -m frameworks

lint: $(VENV)/.stamp-lint  ## ruff, mypy, clang-format, typos
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'cuda/*.cu' 'cuda/*.cuh')
	$(BIN)/typos

format: $(VENV)/.stamp-lint  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'cuda/*.cu' 'cuda/*.cuh')

wheel: $(VENV)/.stamp-base  ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove what the commands above made
	rm -rf $(VENV) dist build
