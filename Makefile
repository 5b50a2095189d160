# Every command sets up what it needs: a virtual environment in .venv, made once and refreshed when
# pyproject.toml or constraints.txt change. Choose another interpreter with `make PYTHON=python3.12 test`.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# All tests run a second time, over the process group instead of shared memory, but for those to which that makes no
# difference: what wraps no module, or is about its names alone, and what says itself which transport it is about.
ONE_WAY := batch benchmarks checkpoint clean_names errors examples footprint ops sharded shipping structure wire \
	collectives fingerprints process_group
BOTH_WAYS := $(filter-out $(patsubst %,tests/test_%.py,$(ONE_WAY)),$(wildcard tests/test_*.py))

.DEFAULT_GOAL := help
.PHONY: help setup demo chargpt bench test lint format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Make .venv with everything that the other commands need

demo: $(INSTALLED) ## Train a conv net on handwritten digits, on two CPU replicas (under a minute)
	$(RUN) examples/digits.py

chargpt: $(INSTALLED) ## Train a small GPT on the standard library's sources, on two CPU replicas
	$(RUN) examples/chargpt.py

bench: $(INSTALLED) ## Measure evenly beside its alternatives (under ten minutes on two idle cores)
	$(RUN) benchmarks/run.py

test: lint ## Everything that must hold before a change is merged: lint, then all tests
	$(RUN) -m pytest -n 2 --dist loadfile
	EVENLY_COLLECTIVES=gloo $(RUN) -m pytest -n 2 --dist loadfile $(BOTH_WAYS)

lint: $(INSTALLED) ## ruff (rules and layout) and pyright (strict)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m pyright --pythonpath $(RUN)

format: $(INSTALLED) ## Lay out the code, and mend what ruff can mend
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

clean: ## Remove the environment and everything that tools and examples left
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist runs src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is touched last, so an installation that was interrupted is taken up again.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[dev,examples,bench]'
	@touch $@
