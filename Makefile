# Everything runs inside .venv, which the first target to need it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU build is enough for every target here; a machine with a GPU may install its own torch first.
TORCH ?= torch==2.13.0

.PHONY: demo test check format install clean

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

test: $(VENV)/.installed-dev
	TRITON_INTERPRET=1 $(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy -p linattn_cli
	$(BIN)/python -m pytest --doctest-modules --pyargs linattn_cli -p no:cacheprovider

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
