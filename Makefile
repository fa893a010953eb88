# The two commands of the README, each doing its own set-up: `make check` and `make test`.
# PYTHON is the first interpreter of version 3.11 or newer; VENV may name another folder.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal
SHELL  := /bin/bash
CLANG_FORMAT := git ls-files -z 'cuda/*.cu' 'cuda/*.cuh' 'cupyflash/_emulator/cpp/*' 'tests/*.cpp' ':!*.md' | xargs -0 $(BIN)/clang-format
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Each step leaves a stamp, so that nothing is installed twice; a change of pyproject.toml runs them again.
$(VENV)/.stamp-venv:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed, and '$(PYTHON)' is none: name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'  # the first that installs dependency groups
	@touch $@

$(VENV)/.stamp-base: pyproject.toml | $(VENV)/.stamp-venv
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.stamp-%: pyproject.toml $(VENV)/.stamp-base
	$(PIP) install --quiet --group $*
	@touch $@

.PHONY: help check gpu test test-frameworks test-nightly lint format wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

check: $(VENV)/.stamp-base gpu  ## the main job: real attention against the fp64 oracle, on the CPU path and on every GPU kernel
	$(BIN)/cupyflash check

# CuPy and NVRTC, only where there is a driver and no CuPy yet. CUDA 13 needs driver 580 or newer.
gpu: $(VENV)/.stamp-base
	@driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d . -f 1); \
	if [[ $$driver =~ ^[0-9]+$$ ]] && ! $(BIN)/python -c 'import importlib.util as u; exit(u.find_spec("cupy") is None)'; then \
		extra=cuda12; (( driver >= 580 )) && extra=cuda13; \
		echo "$(PIP) install --quiet --editable .[$$extra]"; $(PIP) install --quiet --editable ".[$$extra]"; \
	fi

test: $(VENV)/.stamp-test  ## the test-suite (what needs a GPU or a framework that is absent is skipped, with the reason)
	$(PYTEST)

test-frameworks: $(VENV)/.stamp-test $(VENV)/.stamp-frameworks  ## the adapters' tests, with torch and JAX
	$(PYTEST) -m 'frameworks and not nightly'

# Every fourth seed copies as late as it may, and 36 are all orders, paces and numbers of blocks.
test-nightly: $(VENV)/.stamp-test  ## the emulator's tests with more seeds, and under AddressSanitizer and ThreadSanitizer
	CUPYFLASH_EMULATOR_SEEDS=$${CUPYFLASH_EMULATOR_SEEDS:-48} $(PYTEST) -m 'nightly or not gpu' --timeout 3600 \
		tests/test_emula*.py tests/test_mutations.py tests/test_check_emulated.py tests/test_backward_sm90.py

lint: $(VENV)/.stamp-lint  ## ruff, mypy, clang-format, typos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CLANG_FORMAT) --dry-run --Werror
	$(BIN)/typos

format: $(VENV)/.stamp-lint  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CLANG_FORMAT) -i

wheel: $(VENV)/.stamp-base  ## build the wheel into dist/
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove what the commands above made
	rm -rf $(VENV) dist build
