# Everything a fresh machine needs is Python 3.11 or 3.12, and make. Each target sets up what it uses; nothing is installed twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check format bench example clean

demo: $(INSTALLED)
	$(BIN)/millstream train recipes/demo.toml

test: $(INSTALLED)
	$(BIN)/pytest

example: $(INSTALLED)
	$(BIN)/python examples/one_file.py

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	$(BIN)/python bench/admission.py
	$(BIN)/python bench/slow_reward.py

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
