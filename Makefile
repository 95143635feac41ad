# Everything runs in .venv, which is made when it is missing and renewed when the two files that
# say what belongs in it change; otherwise nothing is installed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH := $(shell grep '^torch==' constraints.txt)
PROMPT ?= Once upon a time there was a little girl who
# Greedy text of so small a model goes round in circles; a fixed seed tells one story to everybody.
SETTINGS ?= verify=sample verify.temperature=0.7 verify.top_p=0.9 verify.seed=2

# Eight stages held to the times of RTX 3090s, on any two cores: two and a half times slower than
# life, so that these can keep up; few tokens, as plain decoding takes most of the time.
WAYS := feed=root feed=level feed=best_first
RACE := cluster.stages=8 pace=rtx3090_8 pace.scale=2.5 decode.max_new_tokens=24 \
  verify=sample verify.temperature=0.7 verify.top_p=0.9 verify.seed=3

QUICK := build/bench
# FlashInfer and what its Python imports, of the versions that its tests ran with.
FLASHINFER := flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2 cuda-bindings==13.5.0 \
  cuda-pathfinder==1.9.0 nvidia-ml-py==13.615.71
# The tests of a file share what is slow to make; files share the cores, the long ones first.
PYTEST_FLAGS ?= -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo race pictures test test-flashinfer check bench-quick format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.run
	$(BIN)/pipespec generate --prompt "$(PROMPT)" cluster.stages=4 $(SETTINGS)
	@echo "To see what guessing brings on eight RTX 3090s, EMULATED here, in under a minute: make race"

race: $(VENV)/.run
	$(BIN)/pipespec compare $(WAYS) --prompt "$(PROMPT)" $(RACE)

# Those of README and docs; the dashboard's needs Debian's chromium.
pictures: $(VENV)/.bench
	$(BIN)/python -m tools.screenshots race docs/images/race.svg --prompt "$(PROMPT)" $(WAYS) $(RACE)
	$(BIN)/python -m tools.screenshots dashboard docs/images/dashboard.png

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# How we use FlashInfer, with its own wrappers but without the CUDA packages that it depends on.
test-flashinfer: $(VENV)/.test
	$(PIP) --no-deps --upgrade --target build/flashinfer $(FLASHINFER)
	PYTHONPATH=build/flashinfer $(BIN)/python -m pytest tests/unit/engine/test_flashinfer.py

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS) tests/unit

# Every figure of docs/benchmarks.md at a small size, in less than ten minutes.
bench-quick: $(VENV)/.bench
	mkdir -p $(QUICK)
	for name in memory curves stage timeline tbt sampled scaling overhead load; do \
	  $(BIN)/python -m benchmarks.$$name --quick --json $(QUICK)/$$name.json --plot $(QUICK)/$$name || exit 1; \
	done
	$(BIN)/python -m benchmarks.cascade --quick --json $(QUICK)/cascade.json --plot $(QUICK)/cascade
	$(BIN)/python -m benchmarks.tbt --quick --source synthetic --json $(QUICK)/tbt_synthetic.json --plot $(QUICK)/tbt_synthetic
	$(BIN)/python -m benchmarks.hits --source $(QUICK)/tbt_synthetic.json --json $(QUICK)/hits.json --plot $(QUICK)/hits

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

$(VENV)/.dev: $(VENV)/.test
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@
