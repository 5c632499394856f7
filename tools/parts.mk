# The parts of `make conform`, `make nightly` and `.ci/run`. Three run at a time, one more than two cores: half of a run of
# the kit on an asynchronous device is waiting. A part that fails prints its output, and the others go on (-j3 -k).
BIN := .venv/bin/
PART = @tools/part $@
PYTEST := $(BIN)python -m pytest -q
LIARS := conformance/tests/test_liars.py
# Pageable memory is read when a copy runs, and the happens-before checker looks on: mode, profile, Python.
SIM = HALSIM_MODE=$(1) HALSIM_STAGED=0 $(3)python -m pytest -q --no-header -p no:cacheprovider -p hal_sim.pytest_races \
	--hal-device=sim --hal-profile=$(2) --pyargs hal_conformance

CONFORM := suite-jobs liars suite-kit suite-devices overlap kit-sim-lazy kit-cpu properties ray matrix
NIGHTLY := mutants tests-3.12 tests-3.13 nightly-cpu nightly-sim-eager nightly-sim-worker nightly-sim-lazy \
	kit-maca-over-sim kit-xpu-over-sim kit-xpu-over-cpu kit-cpu-older-paddle kit-sim-older-paddle vllm
PYTHONS := python-3.11 python-3.12 python-3.13
CI := $(CONFORM) no-compiler older-cpus site vllm-bytes $(PYTHONS)

.PHONY: conform nightly ci $(NIGHTLY) $(CI)
conform: $(CONFORM)
nightly: $(NIGHTLY)
ci: $(CI)

suite-kit: ; $(PART) 'HAL_TEST_SHARE=1 $(PYTEST) -m conform --deselect $(LIARS) conformance/tests core/tests'
suite-devices: ; $(PART) 'HAL_TEST_SHARE=1 $(PYTEST) -m conform plugins adapters runners'
suite-jobs: ; $(PART) 'HAL_TEST_SHARE=1 $(PYTEST) -m conform --ignore tests/overlap --ignore tests/distributed/test_ray.py tests'
# One fixture runs all of them.
liars: ; $(PART) '$(PYTEST) -s -m conform -o faulthandler_timeout=3600 $(LIARS)' prints
overlap: ; $(PART) '$(PYTEST) -m conform tests/overlap'
kit-sim-lazy: ; $(PART) '$(call SIM,2,default,$(BIN))'
kit-cpu: ; $(PART) '$(BIN)hal conform cpu --profile default'
properties: ; $(PART) 'HAL_TEST_SHARE=1 $(PYTEST) -m "(hypothesis or drawn) and not conform"'
ray: ; $(PART) '$(PYTEST) -m conform tests/distributed/test_ray.py'
matrix: ; $(PART) '$(BIN)python -m tests.matrix --pairwise'

mutants: ; $(PART) 'make mutants'
tests-3.12 tests-3.13: tests-%: ; $(PART) '$(BIN)python tools/pythons.py $* --tests'
nightly-cpu: ; $(PART) '$(BIN)hal conform cpu --profile nightly'
nightly-sim-eager: ; $(PART) '$(call SIM,0,nightly,$(BIN))'
nightly-sim-worker: ; $(PART) '$(call SIM,1,nightly,$(BIN))'
nightly-sim-lazy: ; $(PART) '$(call SIM,2,nightly,$(BIN))'
kit-maca-over-sim: ; $(PART) 'HAL_MACA_PLACE=sim HALSIM_MODE=2 HALSIM_STAGED=0 $(BIN)hal conform maca --profile default'
kit-xpu-over-sim: ; $(PART) 'HAL_XPU_PLACE=sim $(BIN)hal conform xpu --profile default'
kit-xpu-over-cpu: ; $(PART) 'HAL_XPU_PLACE=cpu $(BIN)hal conform xpu --profile default'
kit-cpu-older-paddle: ; $(PART) '.venv-older/bin/hal conform cpu --profile default'
kit-sim-older-paddle: ; $(PART) '$(call SIM,2,default,.venv-older/bin/)'
# The environment is made by the part (3.4 GB).
vllm: ; $(PART) 'HAL_VLLM_COUNT=1000 make vllm ARGS="-o faulthandler_timeout=7200"'

no-compiler: ; $(PART) '$(BIN)python tools/no_compiler.py'
older-cpus: ; $(PART) '$(BIN)python tools/older_cpu.py'
vllm-bytes: ; $(PART) 'test -e .venv-vllm/.installed || { echo "vLLM is not installed (make vllm)"; exit 77; }; \
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -p no:cacheprovider -m "conform or not conform" \
	-k "bytes or every_fault" adapters/vllm/tests/test_in_vllm.py'
site: ; $(PART) '$(BIN)python tools/site/build.py'
$(PYTHONS): python-%: ; $(PART) '$(BIN)python tools/pythons.py $*'
