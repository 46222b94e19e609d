# make demo       install into .venv and train the recipe digits on 2 processes, on the CPU
# make test       install into .venv and run the fast tests; installs no system packages
# make test-slow  the slow tests: every resume from one topology to another, more kills, more kinds of jobs
# make test-long  run by hand: tests that take many minutes, such as sixty random kills
# make test-lowest  run by hand: the fast tests with the oldest versions that pyproject.toml allows, in .venv-lowest
# make lab-packages  as root on Debian or Ubuntu: install Slurm, mpirun, a browser and shellcheck, which some tests need
# make same-as BASE=main  run by hand: check that this tree computes the same bits as another commit (tests/same_as.py)
# make gpu        on a machine with a GPU: run the GPU measurements for 10 minutes, the most important first, and write each
#                 result to gpu-results/ (GPU_OUT=FOLDER; GPU_ARGS="--parts presets eager", or --dry-run without a GPU; see
#                 benchmarks/RESULTS.md)
#                 GPU_PYTHON=python3: use a Python that already has torch, torchvision, accelerate and transformers, without a
#                 network; other packages are installed separately from the wheels in gpu-wheels/ (GPU_WHEELS=FOLDER)
# make gpu-wheels download these wheels, a few MiB, on a machine with a network, for GPU_PYTHON_VERSION (3.12)
# make docs       build docs/ as a site in docs/_build
# make lint       linter, formatter and type checker
# PYTHON=python3.12 selects the interpreter for .venv.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
LOWEST := .venv-lowest
PYTEST_ARGS ?=
LAB_PACKAGES := slurm-wlm munge iproute2 procps openmpi-bin chromium shellcheck
GPU_PYTHON ?=
GPU_PYTHON_VERSION ?= 3.12
GPU_ENV := .gpu
GPU_WHEELS ?= gpu-wheels
GPU_OUT ?= gpu-results
GPU_ARGS ?=

.PHONY: demo test test-slow test-long test-lowest same-as gpu gpu-wheels lab-packages docs lint format

demo: $(VENV)/.installed
	CUDA_VISIBLE_DEVICES= $(RUN)/samerun launch --preset multi_gpu --processes 2 --recipe digits

# Two workers: tests spend about half of their time waiting for schedulers, time limits and processes.
PYTEST := $(RUN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --seconds-per-file

test: $(VENV)/.compiled
	$(PYTEST) -m "not slow and not long" $(PYTEST_ARGS)

test-slow: $(VENV)/.compiled
	$(PYTEST) -m "slow and not long" $(PYTEST_ARGS)

test-long: $(VENV)/.compiled
	$(RUN)/python -m pytest -m long $(PYTEST_ARGS)

test-lowest: $(LOWEST)/.compiled
	$(LOWEST)/bin/python -m pytest -m "not slow and not long" $(PYTEST_ARGS)

same-as: $(VENV)/.compiled
	$(RUN)/python tests/same_as.py $(BASE) $(ARGS)

gpu: $(if $(GPU_PYTHON),$(GPU_ENV)/.installed,$(VENV)/.installed-dev)
	$(if $(GPU_PYTHON),$(GPU_ENV),$(VENV))/bin/python -m benchmarks.gpu --out $(GPU_OUT) $(GPU_ARGS)

gpu-wheels:
	$(PYTHON) -m benchmarks.gpu.wheels bring $(GPU_WHEELS) --python-version $(GPU_PYTHON_VERSION)

$(GPU_ENV)/.installed: pyproject.toml $(wildcard $(GPU_WHEELS)/*.whl)
	$(GPU_PYTHON) -m benchmarks.gpu.wheels use $(GPU_WHEELS) --into $(GPU_ENV)
	@touch $@

lab-packages:
	@missing=$$(for name in slurmctld munged ip pkill mpirun chromium shellcheck; do command -v $$name >/dev/null || echo $$name; done); \
	if [ -z "$$missing" ]; then \
	    echo "Slurm, mpirun, chromium and shellcheck are installed"; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	    echo "make lab-packages needs root and apt-get; otherwise install these packages: $(LAB_PACKAGES)" >&2; exit 1; \
	else \
	    echo "apt-get install $(LAB_PACKAGES)"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(LAB_PACKAGES) >/dev/null; \
	fi

lint: $(VENV)/.installed-dev
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

docs: $(VENV)/.installed-dev
	$(RUN)/python docs/generate.py
	$(RUN)/python -m sphinx -q -W -b html docs docs/_build

format: $(VENV)/.installed-dev
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

$(RUN)/python:
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv python3-dev g++" >&2; \
	    rm -rf $(VENV); exit 1; }

# pip downloads torch with its GPU libraries, several GB; they also run on a CPU.
$(VENV)/.installed: pyproject.toml | $(RUN)/python
	@echo "installing: torch with its GPU libraries is several GB, which takes some minutes"
	$(RUN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(RUN)/python
	$(RUN)/python -m pip install --quiet --editable .[dev]
	@touch $@ $(VENV)/.installed

# uv can install the oldest allowed versions; pip cannot.
$(LOWEST)/.compiled: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable .[dev]
	TORCH_EXTENSIONS_DIR=$(abspath $(LOWEST))/torch_extensions $(LOWEST)/bin/python -c "from app.distributed.runtime import load_operators; load_operators()"
	@touch $@

# DeepSpeed compiles its CPU kernels once, in a minute or two; tests must not wait for that.
$(VENV)/.compiled: $(VENV)/.installed-dev
	TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/torch_extensions $(RUN)/python -c "from app.distributed.runtime import load_operators; load_operators()"
	@touch $@
