# make demo       sets everything up and opens JupyterLab at the first tutorial;
#                 HEADLESS=1 executes the tutorials instead and writes them to build/
# make check      for every commit: sets everything up, lints and runs the fast tests, in 5 minutes
# make test       sets everything up, lints and runs the tests, with a browser where there is one;
#                 BROWSER=install installs Debian's Chromium when there is none
# make nightly    the tests that take too long for every change, too
# make lint       ruff, mypy and import-linter
# make clean      removes what the others made, .venv included
#
# PYTHON=python3.13 sets up with another Python (without the engine 'ortmodule'), TORCH_INDEX=URL takes
# torch from that index. What is in .venv already stays; set-up is done again only where
# pyproject.toml or the front end's sources have changed since.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo check test nightly lint clean
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
DONE := .venv/ortlab-setup
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Two files of tests at a time: most wait for processes, browsers and compilers half of their time.
# tests/support/slow_tests.py says which are the first.
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

nightly: $(DONE)/test $(DONE)/extension lint
	$(BIN)/python -m tests.support.chromium
	$(BIN)/python -m tests.support.node
	$(BIN)/python -m pytest -m ''

lint: $(DONE)/test
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo >/dev/null || $(BIN)/lint-imports
	@echo "lint: ruff, mypy and import-linter found nothing"

clean:
	rm -rf .venv build dist node_modules ortlab/notebook/js/node_modules ortlab/notebook/static
	rm -rf .pytest_cache .mypy_cache .ruff_cache

# One that is there is used as it is. It sees the packages of the Python that it is made from when
# that has a torch, so that a torch that came with the machine is kept.
$(DONE)/venv:
	@test -x $(BIN)/python || { \
	    python=$${PYTHON:-$$(sh .ci/find-python)}; \
	    with=; ! "$$python" -c 'import torch' 2>/dev/null || with=--system-site-packages; \
	    echo "setup: .venv from $$python $$with"; \
	    "$$python" -m venv $$with .venv && $(PIP) install -qq --upgrade pip; }
	@mkdir -p $(DONE) && touch $@

$(DONE)/torch.txt: $(DONE)/venv pyproject.toml
	@$(BIN)/python .ci/install_torch.py $@

$(DONE)/demo $(DONE)/test: $(DONE)/torch.txt pyproject.toml $(FRONT_END)
	@echo "setup: ortlab and what it needs for $(@F), a few minutes when nothing is cached"
	@$(PIP) install -qq --constraint $(DONE)/torch.txt --editable '.[$(@F)]'
	@touch $@

$(DONE)/extension: $(DONE)/torch.txt | $(if $(filter check test nightly,$(MAKECMDGOALS)),$(DONE)/test,$(DONE)/demo)
	@$(BIN)/ortlab doctor --build || $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'
	@touch $@
