# Every target is one or two lines; `make check` is the whole gate.
PYTHON ?= python3.11
BIN := .venv/bin
SOURCES := kiln_core kiln_cli kiln_server kiln_train_jax
WORKERS ?= 2
EDGE := tests/core tests/drive tests/interop tests/server/test_client.py
COVER := --cov=kiln_core --cov-branch --cov-report=term:skip-covered --cov-fail-under=98

.PHONY: setup demo model-smollm2 test test-long check format lint types layers contracts bench clean lock

setup: .venv/.complete

.venv/.complete: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv && $(BIN)/pip install -q --disable-pip-version-check --require-hashes -r constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . && touch $@

demo: setup
	$(BIN)/python examples/demo.py

model-smollm2: setup
	$(BIN)/python scripts/fetch_smollm2.py models

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu" $(EDGE) $(COVER)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu" $(EDGE:%=--ignore=%)

test-long: model-smollm2
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not gpu"

check: format lint types layers contracts test

format: setup
	$(BIN)/ruff format --check .

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports --no-logo

contracts: setup
	$(BIN)/python scripts/check_lock.py
	$(BIN)/python scripts/export_contracts.py --check

bench: setup
	$(BIN)/python -m benchmarks && $(BIN)/python -m benchmarks --report

lock:
	$(PYTHON) -m pip install -q uv && $(PYTHON) -m uv pip compile pyproject.toml --extra all --extra dev --universal --python-version 3.11 --generate-hashes --no-strip-extras --no-header -q -o constraints.txt

clean:
	rm -rf .venv build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
