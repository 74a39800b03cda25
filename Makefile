# Every target sets up what it needs: scripts/setup.sh installs into .venv, and only when
# requirements or constraints have changed since the last call.
PYTHON := .venv/bin/python
AOT_PYTHON := .venv-aot/bin/python

# Assigned with =, so that the command line sets them and the environment does not.
CONFIG = configs/gqa.py
STUDY = variants
WORKDIR =
TORCH_PYTHON =
ARGS =

.PHONY: help setup setup-dev setup-aot setup-cluster train eval sweep bench test test-broad test-slow \
	test-kernels test-aot lint format

help:
	@echo 'make setup                           install requirements.txt into .venv'
	@echo 'make train [CONFIG=configs/mqa.py]   train; ARGS="--config.train.steps=300" overrides'
	@echo 'make eval  [WORKDIR=runs/gqa]        evaluate a run folder'
	@echo 'make sweep [STUDY=variants]          run configs/sweeps/variants.py and report it'
	@echo 'make bench [TORCH_PYTHON=PATH]       time steps, attention and decoding, beside PyTorch if given'
	@echo 'make test  [ARGS="-k masks"]         run the tests'
	@echo 'make test-broad                      run them for all variants and configs'
	@echo 'make test-slow                       train, sweep, kill, open a browser and a cluster'
	@echo 'make test-kernels                    run the kernels in interpreters, on any machine'
	@echo 'make test-aot                        compile the kernels for TPUs and GPUs, none needed'
	@echo 'make lint                            check style and format'
	@echo 'make format                          repair style and format'
	@echo 'Defaults: CONFIG=$(CONFIG), WORKDIR=runs/<name of the config>. See README.md.'

setup:
	@scripts/setup.sh requirements.txt

setup-dev:
	@scripts/setup.sh requirements-dev.txt

setup-aot:
	@scripts/setup.sh requirements-aot.txt .venv-aot

# Into the environment of the tests, which start a cluster on this machine where they find Ray.
setup-cluster:
	@scripts/setup.sh requirements-cluster.txt

train: setup
	$(PYTHON) train.py --config=$(CONFIG) $(if $(WORKDIR),--workdir=$(WORKDIR)) $(ARGS)

eval: setup
	$(PYTHON) eval.py --workdir=$(or $(WORKDIR),runs/$(basename $(notdir $(CONFIG)))) $(ARGS)

sweep: setup
	$(PYTHON) sweep.py --config=configs/sweeps/$(STUDY).py $(if $(WORKDIR),--workdir=$(WORKDIR)) $(ARGS)

# One at a time: they measure.
bench: setup
	@for benchmark in train_step attention decode; do \
	    $(PYTHON) -m benchmarks.$$benchmark --short $(TORCH_PYTHON:%=--torch_python=%) $(ARGS) || exit 1; \
	done

# Two workers: XLA compiles most programs on one thread, so they fill two cores. By file: tests of
# a file share compiled programs. ARGS="-n 0" runs in one process.
test: setup-dev
	$(PYTHON) -m pytest -n 2 --dist loadfile $(ARGS)

# The same checks for the variants and configs that make test leaves out.
test-broad: setup-dev
	$(PYTHON) -m pytest -n 2 --dist loadfile -m "broad and not interpreted" $(ARGS)

# What takes many seconds each: short trainings, whole sweeps, kills, a browser, a cluster. Their
# programs run for longer than they compile, so they are optimised: see tests/conftest.py.
test-slow: export XLA_FLAGS =
test-slow: setup-dev
	$(PYTHON) -m pytest -n 2 --dist loadfile -m "slow and not interpreted" $(ARGS)

# The cases that all implementations share, for the TPU and GPU kernels in their interpreters.
test-kernels: setup-dev
	$(PYTHON) -m pytest -n 2 --dist worksteal -m interpreted $(ARGS)

# An environment of its own: with a TPU's library in it, jax looks for a TPU.
# Both parts run, whatever the first finds.
test-aot: setup-aot
	@failed=; for part in aot_tpu aot_gpu; do \
	    $(AOT_PYTHON) -m benchmarks.$$part || failed="$$failed $$part"; \
	done; \
	[ -z "$$failed" ] || { echo "test-aot FAILED:$$failed" >&2; exit 1; }

lint: setup-dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: setup-dev
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
