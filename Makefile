# Everything runs inside .venv, which the first target to need it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU build is enough for every target here; a machine with a GPU may install its own torch first.
TORCH ?= torch==2.13.0

# kernels/, tasks/ and recipes/ become packages of linattn_cli when installed. Tools that go by paths do not know
# that and would import them a second time as `kernels`, so types and doctests are checked on this tree, which is
# laid out as a wheel is.
LAYOUT := build/installed
IN_LAYOUT = cd $(LAYOUT) && $(CURDIR)/$(BIN)/python -m

.PHONY: demo test check lint types doctest layout format readme install clean

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/linattn train --recipe demo

# One process a core, the tests of a file together; one thread each, or they would wait for each other.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

check: lint types doctest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

layout: $(VENV)/.installed-dev
	rm -rf $(LAYOUT)
	$(BIN)/python -c 'from setuptools import setup; setup()' --quiet build_py --build-lib $(LAYOUT)

types: layout
	$(IN_LAYOUT) mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/build/mypy -p linattn_cli

doctest: layout
	$(IN_LAYOUT) pytest --doctest-modules --pyargs linattn_cli -p no:cacheprovider

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: $(VENV)/.installed-dev
	$(BIN)/python -m tests.readme_blocks

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
