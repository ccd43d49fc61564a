# `make demo` and `make test` set everything up: a virtual environment in .venv, then the run. The demo needs fewer packages.
PYTHON ?= python3.11
ifeq (, $(shell command -v $(PYTHON) 2>/dev/null))
PYTHON := python3
endif
BIN := .venv/bin
DEMO_INSTALLED := $(if $(filter test test-fast check docs fuzz format,$(MAKECMDGOALS))$(wildcard .venv/installed),.venv/installed,.venv/installed-demo)

.PHONY: help demo test test-fast lint check docs fuzz format clean
help:             ## list the targets
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(DEMO_INSTALLED)    ## train one classifier on ten devices, with a broker and an aggregator
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m examples.quickstart $(DEMO)

# Six processes on any machine: tests wait for brokers and programs more than they compute.
PROCESSES ?= 6
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile

test: .venv/installed      ## run every test, or with TESTS=tests/unit/protocol a part
	$(PYTEST) --no-loadscope-reorder --durations=30 $(TESTS)

test-fast: .venv/installed ## run the unit tests that need neither PyTorch nor PostgreSQL, in less than 4 minutes
	PYTHONPATH=$(CURDIR)/tests/hidden $(PYTEST) -r fE $(or $(TESTS),tests/unit)

RUFF := $(shell grep -o 'ruff==[0-9.]*' pyproject.toml)
lint: build/lint/$(RUFF)   ## check style in seconds, with ruff alone
	build/lint/bin/ruff check .
	build/lint/bin/ruff format --check .

build/lint/$(RUFF):
	@$(PYTHON) -m venv build/lint
	@build/lint/bin/pip install --quiet --disable-pip-version-check $(RUFF)
	@touch $@

check: .venv/installed     ## check lint, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

FUZZ_RUNS ?= 10000000
fuzz: .venv/installed      ## fuzz every parser of untrusted bytes with FUZZ_RUNS=10000000 inputs; more than an hour
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz --runs $(FUZZ_RUNS) $(FUZZ)

docs: .venv/installed      ## build the documentation as a website, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: .venv/installed    ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/installed: pyproject.toml
	$(call install,all)

.venv/installed-demo: pyproject.toml
	$(call install,demo)

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "protofleet needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11")'
	@echo "==> making the virtual environment .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python examples/install.py $(1)
	@$(BIN)/python -m dashboard.vendor || echo "==> without the dashboard's page"
	@touch $@
endef

clean:            ## remove the virtual environment and the demo's files
	rm -rf .venv build/ quickstart/
