# make demo       sets everything up and opens JupyterLab at the first tutorial;
#                 HEADLESS=1 executes the tutorials instead and writes them to build/
# make check      for every commit: sets everything up, lints and runs the fast tests, in 5 minutes
# make test       sets everything up, lints and runs the tests, with a browser where there is one;
#                 BROWSER=install installs Debian's Chromium when there is none
# make plain      tests the engine 'ort' in a second environment, .venv-plain, with plain onnxruntime
# make nightly    the tests that take too long for every change, too, and those of `make plain` with
#                 Python 3.11 and 3.13
# make cluster-test  the tests of workers on several hosts over SSH, Slurm and MPI, which need root,
#                 openssh-server, iproute2, slurm-wlm and openmpi-bin; `make nightly` has them, too
# make lint       ruff, mypy and import-linter
# make clean      removes what the others made, the environments included
#
# PYTHON=python3.13 sets up with another Python, RUNTIME=cpu, gpu or ortmodule with that ONNX Runtime
# (ortmodule where that has a wheel, else cpu), TORCH_INDEX=URL takes torch from that index. What is in .venv already stays; set-up is done again only where
# pyproject.toml or the front end's sources have changed since.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo check test plain test-plain nightly cluster-test lint clean
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/ortlab-setup
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Two files of tests at a time: most wait for processes, browsers and compilers half of their time.
# tests/support/chosen_tests.py says which are the first.
TWO_AT_A_TIME := --numprocesses 2 --dist loadfile --no-loadscope-reorder
FRONT_END := $(shell find ortlab/notebook/js -type f -not -path '*/node_modules/*' 2>/dev/null)

demo: $(DONE)/demo $(DONE)/extension
ifneq ($(filter-out 0,$(HEADLESS)),)
	$(BIN)/python -m tests.support.headless build
else
	$(BIN)/ortlab lab --LabApp.default_url=/lab/tree/notebooks/01_first_run.ipynb
endif

check: $(DONE)/test $(DONE)/extension lint
	$(BIN)/python -m pytest $(TWO_AT_A_TIME) -m 'not nightly and not slow'

test: $(DONE)/test $(DONE)/extension lint
	$(BIN)/python -m tests.support.chromium
	$(BIN)/python -m tests.support.node
	$(BIN)/python -m pytest $(TWO_AT_A_TIME)

plain:
	@$(MAKE) test-plain VENV=.venv-plain RUNTIME=cpu

# tests/support/chosen_tests.py says which these are.
PLAIN := plain and not nightly
test-plain: $(DONE)/test $(DONE)/extension
	$(BIN)/python -m tests.support.chromium
	$(BIN)/python -m pytest $(TWO_AT_A_TIME) -rfE -m '$(PLAIN)'

nightly: $(DONE)/test $(DONE)/extension lint
	$(BIN)/python -m tests.support.chromium
	$(BIN)/python -m tests.support.node
	$(BIN)/python -m pytest -m ''
	@$(MAKE) plain PLAIN=plain
	@$(MAKE) test-plain VENV=.venv-3.13 RUNTIME=cpu PYTHON="$$(sh .ci/find-python 3.13)"

cluster-test: $(DONE)/test $(DONE)/extension
	$(BIN)/python -m pytest -m cluster tests/cluster

lint: $(DONE)/test
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo >/dev/null || $(BIN)/lint-imports
	@echo "lint: ruff, mypy and import-linter found nothing"

clean:
	rm -rf .venv .venv-plain .venv-3.13 build dist node_modules ortlab/notebook/js/node_modules ortlab/notebook/static
	rm -rf .pytest_cache .mypy_cache .ruff_cache

# One that is there is used as it is. It sees the packages of the Python that it is made from when
# that has a torch, so that a torch that came with the machine is kept.
$(DONE)/venv:
	@test -x $(BIN)/python || { \
	    python=$${PYTHON:-$$(sh .ci/find-python)}; \
	    with=; ! "$$python" -c 'import torch' 2>/dev/null || with=--system-site-packages; \
	    echo "setup: $(VENV) from $$python $$with"; \
	    "$$python" -m venv $$with $(VENV) && $(PIP) install -qq --upgrade pip; }
	@mkdir -p $(DONE) && touch $@

$(DONE)/torch.txt: $(DONE)/venv pyproject.toml
	@$(BIN)/python .ci/install_torch.py $@

$(DONE)/demo $(DONE)/test: $(DONE)/torch.txt pyproject.toml $(FRONT_END)
	@echo "setup: ortlab and what it needs for $(@F), a few minutes when nothing is cached"
	@$(PIP) install -qq --constraint $(DONE)/torch.txt \
	    --editable ".[$(@F),$${RUNTIME:-$$($(BIN)/python .ci/runtime.py)}]"
	@touch $@

$(DONE)/extension: $(DONE)/torch.txt | $(if $(filter check test nightly cluster-test,$(MAKECMDGOALS)),$(DONE)/test,$(DONE)/demo)
	@$(BIN)/ortlab doctor --build
	@touch $@
