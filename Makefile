# The two commands a newcomer needs: `make serve` and `make test`. Both set up everything in .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# Compiled files are kept, whatever the environment says: each worker and each program that a test starts would compile
# all sources and tests anew (some 20 s of CPU time a worker).
export PYTHONDONTWRITEBYTECODE :=

GPU_WORKERS ?= 12

.PHONY: help demo serve quick quick-gpu test test-gpu test-slow lint docs format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "FathomLM needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing FathomLM into $(VENV) (a minute or two, once)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing FathomLM and its server into $(VENV) (a minute or two, once)"
	@$(PIP) -e ".[serve]"
	@touch $(VENV)/.core $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing FathomLM and its test tools into $(VENV) (a minute or two, once)"
	@$(PIP) -e ".[dev,train,plot,eval,serve]"
	@touch $(VENV)/.core $(VENV)/.serve $@

demo: $(VENV)/.core ## Show tokens by their depth, or where no model came along, SmolLM2-135M made recursive
	@$(BIN)/fathomlm demo

serve: $(VENV)/.serve ## Serve what is at hand (or MODEL=...): OpenAI's API and a page to write, chat and compare on
	@$(BIN)/fathomlm serve $(MODEL)

test: $(VENV)/.dev ## Run the tests (2 cores, no GPU)
	@command -v chromium >/dev/null || echo "no Chromium here: the page's browser tests will be skipped"
	@$(BIN)/python -m pytest -n 2 --dist worksteal

quick: $(VENV)/.dev ## Run one test of each file, those of every room (2 cores, no GPU)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m 'quick and not gpu'

quick-gpu: $(VENV)/.dev ## Run one case of each GPU test (six processes share the GPU; ends with an error after four minutes)
	@$(BIN)/python -m pytest -n 6 --dist worksteal -m 'quick and gpu and not alone' --session-timeout 240

test-gpu: $(VENV)/.dev ## Run all GPU tests (GPU_WORKERS processes share the GPU)
	@$(BIN)/python -m pytest -n $(GPU_WORKERS) --dist worksteal -m 'gpu and not alone'
	@$(BIN)/python -m pytest -m 'gpu and alone'

test-slow: $(VENV)/.dev ## Run the tests marked slow, those of replicas on Ray among them
	@$(PIP) -e ".[ray]"
	@$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev ## Run ruff, mypy and the import contract
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) -e ".[docs]"
	@touch $@

docs: $(VENV)/.docs ## Build the documentation as a site, with an API reference, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

format: $(VENV)/.dev ## Format the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean: ## Remove the environment, caches and the demo's output
	rm -rf $(VENV) demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
