PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.PHONY: help run test lint bench clean
help:            ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): requirements-dev.txt pyproject.toml core/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	@touch $@

run: $(STAMP)    ## generate text: make run ARGS='--prompt "def main(" --max-tokens 64'
	@$(BIN)/hal run $(ARGS)

lint: $(STAMP)   ## ruff and mypy (strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint       ## lint, then every test
	$(BIN)/python -m pytest $(ARGS)

bench: $(STAMP)  ## the benchmarks, compared in one run
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
