# The two commands a user needs are `make demo` and `make test`; everything else is for developers.
# pip runs with your own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf); nothing here overrides them.

PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo study test test-slow fault-drill gpu-check lint clean

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

demo: .venv/.installed ## Pretrain a small BERT on real text, shared, then unshared: outputs/demo
	$(BIN)/sharebert train +experiment=demo

# Hours; the same command goes on where it stopped. STEPS=small: minutes. DEVICE=cuda: one GPU. CORPUS='a.jsonl.gz ...':
# your text, VALID='...': held-out text besides. ARGS: more flags, see `python -m sharebert.study --help`.
study: .venv/.installed ## Compare sharing with baselines on real text, in hours (STEPS=small: minutes): outputs/study
	$(BIN)/python -m sharebert.study $(if $(STEPS),--steps $(STEPS)) $(if $(DEVICE),--device $(DEVICE)) \
	  $(if $(CORPUS),--corpus $(CORPUS)) $(if $(VALID),--valid $(VALID)) $(ARGS)

test: .venv/.installed ## Run all fast tests, on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: .venv/.installed ## Run the long loops and drills
	$(BIN)/python -m pytest -m slow

fault-drill: .venv/.installed ## Kill, freeze and damage small runs in every way, and compare the ends: 10 minutes (SEED=...)
	PYTHONPATH=tests $(BIN)/python -m drill $(if $(SEED),--seed $(SEED)) $(ARGS)

gpu-check: .venv/.installed ## Check and measure what needs a GPU: outputs/gpu-check (without one, a dry run)
	$(BIN)/python tests/gpu_check.py $(ARGS)

lint: .venv/.installed ## Check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean: ## Remove the environment, caches and build products; keeps outputs/
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment, made again when its requirements change.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "sharebert needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one, as in: make demo PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
