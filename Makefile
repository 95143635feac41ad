# Everything runs in .venv, which is made when it is missing and renewed when the two files that
# say what belongs in it change; otherwise nothing is installed.

PYTHON ?= python3
# Where it is set, every process that the tests start would compile all modules anew, and pytest
# rewrite every test.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH := $(shell grep '^torch==' constraints.txt)
PROMPT ?= Once upon a time there was a little girl who
# Greedy text of so small a model goes round in circles; a fixed seed tells one story to everybody.
SETTINGS ?= sampling.temperature=0.7 sampling.top_p=0.9 sampling.seed=2

# Eight stages held to the times of RTX 3090s, on any two cores: two and a half times slower than
# life, so that these can keep up; few tokens, as plain decoding takes most of the time.
RACE := cluster.stages=8 emulate=rtx3090_8 emulate.scale=2.5 decode.max_new_tokens=24 \
  sampling.temperature=0.7 sampling.top_p=0.9 sampling.seed=3

QUICK := build/bench
# FlashInfer and what its Python imports, of the versions that its tests ran with.
FLASHINFER := flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2 cuda-bindings==13.5.0 \
  cuda-pathfinder==1.9.0 nvidia-ml-py==13.615.71
# The tests of a file share what is slow to make; files share the cores, the long ones first. A third
# worker makes it no faster on two cores.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo race docs test test-all test-real test-flashinfer lint check check-gpu-code \
  bench-quick format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.run
	$(BIN)/pipespec generate --prompt "$(PROMPT)" cluster.stages=4 $(SETTINGS)
	@echo "To see what speculation brings on eight RTX 3090s, EMULATED here, in under a minute: make race"

race: $(VENV)/.run
	mkdir -p build
	echo "$(PROMPT)" > build/race.txt
	$(BIN)/pipespec bench --policies root,level,best_first --dataset build/race.txt $(RACE)

# The documentation as a site, in build/site; a broken link fails. Read it with
# python -m http.server --directory build/site (search does not work from files).
docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict --clean

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# The tests and cases that `make test` leaves out too, and every entry of the lossless matrix.
# Overwrites the stored result; commit it when the run was of a clean checkout. PART=1/3 runs the
# first of three parts, each with a result of its own.
test-all: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --long $(if $(PART),--part $(PART)) \
	  --write-results tests/results/test_all$(if $(PART),_$(subst /,_of_,$(PART))).json

# Everything that needs real weights; PIPESPEC_TEST_MODELS is the folder with them.
test-real: $(VENV)/.test
	@test -d "$(PIPESPEC_TEST_MODELS)" || \
	  { echo "Set PIPESPEC_TEST_MODELS to a folder with real models (CONTRIBUTING.md)." >&2; exit 2; }
	$(BIN)/python -m pytest -rs --long -m real_models

# How we use FlashInfer, with its own wrappers but without the CUDA packages that it depends on.
test-flashinfer: $(VENV)/.test
	$(PIP) --no-deps --upgrade --target build/flashinfer $(FLASHINFER)
	PYTHONPATH=build/flashinfer $(BIN)/python -m pytest tests/unit/engine/attention/test_flashinfer.py

# The kernels for GPUs, on a machine without one: compiled for each architecture, a selection of
# all shapes, and executed by Triton's interpreter.
check-gpu-code: $(VENV)/.test
	$(BIN)/python -m tools.gpu_code
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --long tests/unit/gpu_code \
	  tests/unit/engine/attention/test_triton_backend.py

# What reads the code and runs none of it.
lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The slow unit tests are a part of `make test`.
check: lint
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS) -m "not slow" tests/unit

# The main figures of docs/benchmarks.md at a small size, in six minutes.
bench-quick: $(VENV)/.bench
	mkdir -p $(QUICK)
	for name in budgets.rank_memory budgets.stage_time drafts.accuracy_curves pipeline.tbt \
	    load.throughput; do \
	  $(BIN)/python -m benchmarks.$$name --quick --json $(QUICK)/$$name.json || exit 1; \
	done
	$(BIN)/python -m benchmarks.pipeline.tbt --quick --proposer synthetic --json $(QUICK)/tbt_synthetic.json --plot $(QUICK)/tbt_synthetic

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pipespec needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch goes in by itself first: it decides its own version and CUDA packages, and nothing that
# follows may resolve another.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	@echo "Installing $(TORCH) into $(VENV): some minutes, once."
	$(PIP) $(TORCH)
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(PIP) -c constraints.txt -e '.[grammar,serve]'
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(PIP) -c constraints.txt -e '.[bench]'
	touch $@

$(VENV)/.docs: $(VENV)/.run
	$(PIP) -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@
