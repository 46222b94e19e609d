# make demo       install into .venv and train the embedded default on 2 processes of this machine's CPU
# make test       install into .venv and run every test but the slow ones; as root on Debian or Ubuntu also install Slurm and
#                 mpirun, which some of them run on a lab of namespaces, and a browser (elsewhere they are skipped, and say so)
# make test-slow  the slow ones: resuming from every topology to every other, more kills, more kinds of jobs
# make test-long  by hand: what takes many minutes, such as sixty random kills
# make test-lowest  by hand: the fast tests with the oldest versions that pyproject.toml allows, in .venv-lowest
# make same-as BASE=main  by hand: whether a change that shall change no result changes none (tests/same_as.py)
# make gpu        on a machine with a GPU: what it has to show in 10 minutes, the most important first, written to gpu-results/ as
#                 it is found (GPU_OUT=FOLDER; GPU_ARGS="--parts presets eager", or --dry-run without a GPU; docs/performance-gpu.md)
#                 GPU_PYTHON=python3: in a Python that has its own torch, torchvision, accelerate and transformers, without a
#                 network; what else it lacks is installed beside it, from the wheels in gpu-wheels/ (GPU_WHEELS=FOLDER)
# make gpu-wheels brings these wheels, a few MiB, on a machine with a network, for GPU_PYTHON_VERSION (3.12)
# make docs       docs/ as a site, in docs/_build
# make lint       linter, formatter and type checker
# PYTHON=python3.12 chooses the interpreter that .venv is made from.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
LOWEST := .venv-lowest
PYTEST_ARGS ?=
GPU_PYTHON ?=
GPU_PYTHON_VERSION ?= 3.12
GPU_ENV := .gpu
GPU_WHEELS ?= gpu-wheels
GPU_OUT ?= gpu-results
GPU_ARGS ?=

.PHONY: demo test test-slow test-long test-lowest same-as gpu gpu-wheels lab-packages docs lint format

demo: $(VENV)/.installed
	CUDA_VISIBLE_DEVICES= $(RUN)/samerun launch --preset multi_gpu --processes 2 --recipe digits

# Two workers: the tests wait as long as they compute, for schedulers, time limits and processes that end.
PYTEST := $(RUN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --seconds-per-file

test: $(VENV)/.compiled | lab-packages
	$(PYTEST) -m "not slow and not long" $(PYTEST_ARGS)

test-slow: $(VENV)/.compiled | lab-packages
	$(PYTEST) -m "slow and not long" $(PYTEST_ARGS)

test-long: $(VENV)/.compiled | lab-packages
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
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    ! { command -v slurmctld && command -v mpirun && command -v chromium; } >/dev/null; then \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	        slurm-wlm munge iproute2 procps openmpi-bin chromium; } >/dev/null || \
	    echo "no Slurm, mpirun and browser could be installed: their tests will be skipped" >&2; fi

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

# torch comes from the registry with its GPU libraries, several GB; they run on CPU as well.
$(VENV)/.installed: pyproject.toml | $(RUN)/python
	@echo "installing: torch with its GPU libraries is several GB, which takes some minutes"
	$(RUN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(RUN)/python
	$(RUN)/python -m pip install --quiet --editable .[dev]
	@touch $@ $(VENV)/.installed

# pip has no way to choose the oldest versions; uv has.
$(LOWEST)/.compiled: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable .[dev]
	TORCH_EXTENSIONS_DIR=$(abspath $(LOWEST))/torch_extensions $(LOWEST)/bin/python -c "from app.distributed.runtime import load_operators; load_operators()"
	@touch $@

# DeepSpeed compiles what it needs on a CPU, for a minute or two: once, and not while tests wait for it.
$(VENV)/.compiled: $(VENV)/.installed-dev
	TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/torch_extensions $(RUN)/python -c "from app.distributed.runtime import load_operators; load_operators()"
	@touch $@
