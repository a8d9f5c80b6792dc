# Everything from a fresh clone, with only Python 3.11 or newer: `make help` lists it.
# Packages go to the active virtual environment, or to .venv, which is made when none is active.

PYTHON ?= python3
JOBS   ?= 2
ARGS   ?=
VENV   := $(or $(VIRTUAL_ENV),.venv)
PY     := $(VENV)/bin/python
# pip shows its progress to a person and is quiet in a log.
PIP    := $(PY) -m pip install $(shell test -t 2 || echo --quiet) --disable-pip-version-check --constraint constraints.txt
# The stamp's name holds this folder: an environment shared by two clones is installed anew for each.
STAMP  := $(VENV)/.isoloco-$(shell printf %s "$(CURDIR)" | cksum | cut -d " " -f 1)
EXTRAS := tensorboard,wandb,torchft
PYTEST  = $(PY) -m pytest --numprocesses $(JOBS)

ifdef VIRTUAL_ENV
ifeq ($(wildcard $(PY)),)
$(error VIRTUAL_ENV is $(VIRTUAL_ENV), which holds no bin/python: run deactivate, or unset it)
endif
endif

.DEFAULT_GOAL := help
.PHONY: help train test check docs-check docs format wheel constraints clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Variables: ARGS="..." goes to isoloco train or pytest, PYTHON=python3.12 picks the interpreter, JOBS=$(JOBS) test processes.'

train: $(STAMP)-run  ## train a small language model on the text that ships with the package
	$(PY) -m isoloco train quickstart $(ARGS)

# One thread for each test process: thread pools of several processes on the same cores slow each other down.
test check docs-check: export OMP_NUM_THREADS := 1
test check docs-check: export MKL_NUM_THREADS := 1
test check docs-check: export OPENBLAS_NUM_THREADS := 1
# No test reads from the network: what tries to fails at once instead of waiting.
test check docs-check: export HF_HUB_OFFLINE := 1

test: $(STAMP)-dev  ## run every test
	$(PYTEST) $(ARGS)

check: $(STAMP)-dev  ## lint, format, types and the quick tests
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pyright --pythonpath $(PY)
	$(PYTEST) -m "not slow and not dist and not gpu" $(ARGS)

docs-check: $(STAMP)-dev  ## hold the documentation to what is there: links, commands, snippets, figures
	$(PYTEST) tests/test_docs.py $(ARGS)

docs: $(STAMP)-docs  ## build the site of the documentation into site/
	$(VENV)/bin/zensical build --strict

format: $(STAMP)-dev  ## format the code and mend what ruff can
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

wheel: $(STAMP)-dev  ## build dist/isoloco-*.whl
	rm -rf build
	$(PY) -m build --wheel --no-isolation

# With the oldest Python that is supported: newer ones find wheels of the same releases. PyTorch stays where it is,
# since another release may give other numbers: to move it, edit its line first.
constraints: | $(PY)  ## pin the newest releases of all but PyTorch in constraints.txt
	@set -e; fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(PY) -m venv "$$fresh"; \
	"$$fresh/bin/python" -m pip install --quiet --upgrade pip; \
	grep '^torch==' constraints.txt > "$$fresh/torch"; \
	"$$fresh/bin/python" -m pip install --quiet --constraint "$$fresh/torch" --editable ".[$(EXTRAS)]" --group dev --group docs; \
	sed -n '/^#/p' constraints.txt > "$$fresh/pins"; \
	"$$fresh/bin/python" -m pip list --format freeze | tr '[:upper:]_' '[:lower:]-' \
	| grep -vE '^(isoloco|nvidia-|cuda-|triton)' | sed 's/+.*//' | LC_ALL=C sort >> "$$fresh/pins"; \
	cp "$$fresh/pins" constraints.txt

clean:  ## remove build products and caches (environments and runs/ stay)
	rm -rf build dist site .cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -type d -name __pycache__ -prune -exec rm -rf {} +

# $(1): what pip is asked for
define install
	@echo "Installing isoloco into $(VENV) (the first time PyTorch comes with it: that takes minutes)"
	@rm -f $(VENV)/.isoloco-*
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
	@$(PIP) --upgrade pip
	@$(PIP) --build-constraint constraints.txt $(1)
endef

$(STAMP)-run: pyproject.toml constraints.txt | $(PY)
	$(call install,--editable .)
	@touch $@

$(STAMP)-dev: pyproject.toml constraints.txt | $(PY)
	$(call install,--editable ".[$(EXTRAS)]" --group dev)
	@touch $(STAMP)-run $@

# Reads the sources, so the package need not be installed; the first stamp brings a pip that knows groups.
$(STAMP)-docs: pyproject.toml constraints.txt | $(STAMP)-run
	@$(PIP) --group docs
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "isoloco needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1): name another one, as in make PYTHON=python3.12 train" >&2; \
	exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
