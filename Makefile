# Two commands do everything on a fresh machine:
#   make profile   set up, build a small corpus, profile this machine (or the cluster at RAY_ADDRESS)
#   make test      set up, then lint, strict types and tests

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

ROWS   ?= 6000
MODEL  ?= builtin:gpt-1m
OUT    ?= .pichak
CORPUS := $(OUT)/stdlib-$(ROWS).jsonl
FLAGS  ?=
# Tests that run beside each other; half of their time they wait.
JOBS   ?= 3

.DEFAULT_GOAL := help
.PHONY: help profile test lint types pytest test-slow bench soak validate clean

help:
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)
	@echo "make test-slow | bench | soak | validate | clean   longer checks, and starting over"

# One stamp for each set of extras, so that `make profile` need not wait for the test tools.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed; $$($(PYTHON) --version 2>&1) is what '$(PYTHON)' runs." \
	       "Try: make PYTHON=python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "python -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }

$(VENV)/.installed-run: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (about a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-run
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,hf,dev]'
	@touch $@

$(CORPUS): $(VENV)/.installed-run scripts/build_corpus.py
	@mkdir -p $(OUT)
	@$(BIN)/python scripts/build_corpus.py --rows $(ROWS) --out $@

profile: $(VENV)/.installed-run $(CORPUS)
	@$(BIN)/pichak fleet profile --data $(CORPUS) --model $(MODEL) $(FLAGS)

test: lint types pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

pytest: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

# The other tools live in an environment of their own, so that none of them bends the versions here.
BENCH_VENV ?= .venv-bench
BENCH      := validation/bench_others

$(BENCH_VENV)/.installed: $(BENCH)/requirements.txt
	@test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	@echo "installing the tools to compare with into $(BENCH_VENV) (about two minutes)"
	@$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

bench: $(BENCH_VENV)/.installed $(VENV)/.installed-dev
	@missed=0; \
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(BENCH_VENV)/bin/python $(BENCH)/run.py || missed=1; \
	$(BIN)/python validation/scale/run.py || missed=1; \
	exit $$missed

# An hour of work and faults on a local cluster, and beside it what telemetry costs in that hour;
# SOAK_SECONDS=240 for a short one.
SOAK_SECONDS ?= 3600
SEED ?= 1
soak: $(VENV)/.installed-dev
	@$(BIN)/python validation/agent_overhead/run.py --minutes $$(( $(SOAK_SECONDS) / 60 )) & overhead=$$!; \
	missed=0; \
	$(BIN)/python validation/soak/run.py --seconds $(SOAK_SECONDS) --seed $(SEED) || missed=1; \
	wait $$overhead || missed=1; \
	exit $$missed

clean:
	rm -rf $(VENV) $(BENCH_VENV) .mypy_cache .ruff_cache .pytest_cache build dist

NAME ?= *
validate: $(VENV)/.installed-dev
	@set -e; for run in validation/$(NAME)/run.py; do \
	  echo "== $$run"; $(BIN)/python $$run || { code=$$?; \
	  if [ $$code = 2 ]; then echo "   not run on this machine"; else exit $$code; fi; }; done
