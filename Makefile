# Every target sets up what it needs: scripts/setup.sh installs into .venv, and only when
# requirements or constraints have changed since the last call.
PYTHON := .venv/bin/python

# Assigned with =, so that the command line sets them and the environment does not.
CONFIG = configs/gqa.py
WORKDIR =
ARGS =

.PHONY: help setup setup-dev train eval test lint format

help:
	@echo 'make setup                           install requirements.txt into .venv'
	@echo 'make train [CONFIG=configs/mqa.py]   train; ARGS="--config.train.steps=300" overrides'
	@echo 'make eval  [WORKDIR=runs/gqa]        evaluate a run folder'
	@echo 'make test  [ARGS="-k masks"]         run the tests'
	@echo 'make lint                            check style and format'
	@echo 'make format                          repair style and format'
	@echo 'Defaults: CONFIG=$(CONFIG), WORKDIR=runs/<name of the config>. See README.md.'

setup:
	@scripts/setup.sh requirements.txt

setup-dev:
	@scripts/setup.sh requirements-dev.txt

train: setup
	$(PYTHON) train.py --config=$(CONFIG) $(if $(WORKDIR),--workdir=$(WORKDIR)) $(ARGS)

eval: setup
	$(PYTHON) eval.py --workdir=$(or $(WORKDIR),runs/$(basename $(notdir $(CONFIG)))) $(ARGS)

# Two workers: XLA compiles most programs on one thread, so they fill two cores. By file: tests of
# a file share compiled programs. ARGS="-n 0" runs in one process.
test: setup-dev
	$(PYTHON) -m pytest -n 2 --dist loadfile $(ARGS)

lint: setup-dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: setup-dev
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
