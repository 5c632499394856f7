PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.PHONY: help run test lint bench conform nightly soak fuzz clean
help:            ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): requirements-dev.txt pyproject.toml core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
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

conform: $(STAMP) ## the conformance kit, default profile, on cpu and sim; the liars; the guards
	$(BIN)/hal conform cpu --profile default
	$(BIN)/hal conform sim --profile default
	$(BIN)/hal conform --liars
	$(BIN)/python tools/guards.py

nightly: $(STAMP) ## ten times the examples
	$(BIN)/hal conform cpu --profile nightly
	$(BIN)/hal conform sim --profile nightly

soak: $(STAMP)   ## the chaos test of the output path, 10,000 steps
	$(BIN)/python tests/output/chaos.py --steps 10000 $(ARGS)

fuzz: $(STAMP)   ## fuzz the decoding of frames with atheris for ten minutes
	$(BIN)/python -m pip install -q --disable-pip-version-check atheris
	$(BIN)/python tests/output/fuzz_frames.py --seconds 600 $(ARGS)

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
