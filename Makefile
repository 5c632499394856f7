PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OLDER  := .venv-older
ARGS   ?=

.PHONY: help run test tests lint bench conform nightly soak fuzz clean
help:            ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# Said before a virtual environment is made: one of another Python fails late, and in words of pip's. --clear below, because
# one that is broken, or of another Python than is asked for now, would stay so.
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	echo "hal: $(PYTHON) is $$($(PYTHON) --version 2>&1): Python 3.11, 3.12 or 3.13 is needed (make PYTHON=python3.11 …)" >&2; exit 1; }

# Without shared memory all else works, so pip may fail there; what failed it says itself.
$(STAMP): requirements-dev.txt pyproject.toml core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --only-binary iceoryx2 -e '.[shm]' || true
	@$(BIN)/python -c 'import iceoryx2' 2>/dev/null || \
		echo "hal: iceoryx2 is not installed (it has wheels for x86-64 Linux with glibc 2.34):" \
			"shared memory is left out, its tests are skipped" >&2
	@touch $@

run: $(STAMP)    ## generate text: make run ARGS='--prompt "def main(" --max-tokens 64'
	@$(BIN)/hal run $(ARGS)

lint: $(STAMP)   ## ruff and mypy (strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(STAMP)   ## lint and every test, beside each other
	@$(MAKE) --no-print-directory -j2 lint tests

tests: $(STAMP)  ## every test, without lint
	$(BIN)/python -m pytest $(ARGS)

bench: $(STAMP)  ## the benchmarks, compared in one run
	$(BIN)/python benchmarks/run.py $(ARGS)

# One run of the kit on sim: mode (0 eager, 1 worker, 2 lazy), profile, Python. Pageable memory is read when a copy runs, and
# the happens-before checker looks on.
SIM = HALSIM_MODE=$(1) HALSIM_STAGED=0 $(3) -m pytest -q --no-header -p no:cacheprovider -p hal_sim.pytest_races \
	--pyargs hal_core.conformance --hal-device=sim --hal-profile=$(2)

conform: $(STAMP) $(OLDER)/.installed ## the kit, default profile: cpu, sim (three modes), maca, xpu, an older Paddle, liars, guards
	$(BIN)/hal conform cpu --profile default
	$(call SIM,0,default,$(BIN)/python)
	$(call SIM,1,default,$(BIN)/python)
	$(call SIM,2,default,$(BIN)/python)
	HAL_MACA_PLACE=sim HALSIM_MODE=2 HALSIM_STAGED=0 $(BIN)/hal conform maca --profile default
	HAL_XPU_PLACE=sim $(BIN)/hal conform xpu --profile default
	HAL_XPU_PLACE=cpu $(BIN)/hal conform xpu --profile default
	$(OLDER)/bin/hal conform cpu --profile default
	$(call SIM,2,default,$(OLDER)/bin/python)
	$(BIN)/hal conform --liars
	$(BIN)/python tools/guards.py

nightly: $(STAMP) ## ten times the examples
	$(BIN)/hal conform cpu --profile nightly
	$(call SIM,0,nightly,$(BIN)/python)
	$(call SIM,1,nightly,$(BIN)/python)
	$(call SIM,2,nightly,$(BIN)/python)

$(OLDER)/.installed: requirements-dev.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(OLDER)
	$(OLDER)/bin/python -m pip install -q --disable-pip-version-check 'paddlepaddle==3.1.*' setuptools pytest hypothesis \
		-e './core[conformance]' -e . -e ./plugins/sim
	@touch $@

soak: $(STAMP)   ## the chaos test of the output path, 10,000 steps
	$(BIN)/python tests/output/chaos.py --steps 10000 $(ARGS)

fuzz: $(STAMP)   ## fuzz the decoding of frames with atheris for ten minutes
	$(BIN)/python -m pip install -q --disable-pip-version-check atheris
	$(BIN)/python tests/output/fuzz_frames.py --seconds 600 $(ARGS)

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) $(OLDER) .pytest_cache .mypy_cache .ruff_cache .hypothesis
