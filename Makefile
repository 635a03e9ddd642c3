# Every command of the project by name; .ci/run calls the same ones. Needs make and a Python of at least 3.11.

PYTHON ?= python3
VENV   ?= .venv
# One more than the processors of the smallest machine that runs the tests: many a test waits.
JOBS   ?= 3
BIN    := $(VENV)/bin
# The tests of a file share services, so they run in one process; the files with most tests come first.
PYTEST  = $(BIN)/python -m pytest -p tests.harness.progress -n $(JOBS) --dist loadfile --max-worker-restart=0
# What make check leaves out of tests/, beside what is marked long: tests that start services, or that need all kernels,
# which take a minute to compile on a machine that has none.
SYSTEM := conformance gpu harness interop processes seeds server/compute soak
CHECK  := -m "not slow and not long" --hypothesis-profile=sample
DEMO   := cs-launch --devices cpu:0,cpu:1 --parameter-device cpu:0 examples/digits.py

# pip says nothing but what went wrong.
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1
export PIP_ROOT_USER_ACTION = ignore
export PIP_QUIET = 2
# Modules are compiled when they are imported, and most never are: to compile all takes longer than to install them.
INSTALL = $(BIN)/python -m pip install --no-compile --only-binary=:all:
# Material for MkDocs says at every build that its authors have begun another project.
export NO_MKDOCS_2_WARNING = 1
# Where it is set, every process of every service that a test starts compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo setup check test test-slow test-properties test-zeromq test-containers test-interop test-tools test-soak test-pythons test-all \
        lint pytest fmt docs docs-serve dist soak bench bench-quick compare-tf clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(VENV)/.installed-demo  ## train the handwritten digits on two workers and one parameter process
	PATH="$(abspath $(BIN)):$$PATH" $(DEMO)

setup: $(VENV)/.installed-dev  ## make the virtual environment with all that development needs

check: $(VENV)/.installed-dev  ## style, types, contracts, and the quick tests that start no service: a minute and a half
	@$(MAKE) --no-print-directory -j2 lint pytest IGNORED="$(SYSTEM)" CHOSEN='$(CHECK)'

test: $(VENV)/.installed-dev  ## check, the long tests, and those of the whole system: five minutes
	@$(MAKE) --no-print-directory -j2 lint pytest IGNORED="interop soak" CHOSEN=--hypothesis-profile=sample

test-slow: $(VENV)/.installed-dev  ## what test leaves out: programs in threads and on stand-ins for GPUs, deaths at every event, ...
	@$(PYTEST) -m slow --ignore=tests/interop --ignore=tests/soak

test-properties: $(VENV)/.installed-dev  ## fifty times as many examples of every property as test tries
	@$(PYTEST) -m hypothesis --hypothesis-profile=full --timeout=600 --ignore=tests/interop --ignore=tests/soak

test-zeromq: $(VENV)/.installed-dev  ## the tests of whole services again, with every message over ZeroMQ
	@CS_MAILBOXES=off $(PYTEST) tests/conformance tests/processes

test-containers: $(VENV)/.installed-dev  ## docker-compose with a real engine, which is installed and started where that may be
	@tests/containers/run $(BIN)/python $(if $(IF_POSSIBLE),--if-possible)

test-interop: $(VENV)/.installed-interop  ## replica functions of torch, and data of torch, grain and Hugging Face, which are installed for it
	@$(BIN)/python -m pytest tests/interop

test-tools: docs  ## a browser reads the documentation site; installed where that may be, else nothing is tested
	@tests/tools/run $(BIN)/python

test-soak: $(VENV)/.installed-dev  ## a sample of the soak: each promise a few times, and guarantees broken on purpose
	@$(PYTEST) tests/soak

test-pythons: $(VENV)/.installed-dev  ## the wheel, installed from the index, under every other Python that is at hand
	@CS_PYTHONS=1 $(BIN)/python -m pytest tests/pythons

test-all:  ## all of the above
	@for tier in test test-slow test-properties test-zeromq test-interop test-tools test-soak test-pythons "test-containers IF_POSSIBLE=1"; do \
		$(MAKE) --no-print-directory $$tier || exit; \
	done

# Says nothing but what is wrong: it runs beside the tests, which show how far they are.
lint: $(VENV)/.installed-dev  ## style, types and contracts, without the tests
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@said=$$($(BIN)/lint-imports) || { echo "$$said"; exit 1; }

pytest: $(VENV)/.installed-dev
	@$(PYTEST) $(CHOSEN) $(IGNORED:%=--ignore=tests/%)

docs: $(VENV)/.installed-docs  ## build the documentation site in build/site; a broken link or a docstring that lacks a part fails
	@said=$$($(BIN)/python -m mkdocs build 2>&1) || { echo "$$said"; exit 1; }
	@$(BIN)/python -m pytest --quiet tests/test_reference.py

docs-serve: $(VENV)/.installed-docs  ## show the documentation site at http://127.0.0.1:8000, and again after every change
	@$(BIN)/python -m mkdocs serve --watch client --watch docs

soak: $(VENV)/.installed-dev  ## kill, stop and lose thousands of times what trains; goes on where it was interrupted
	@$(BIN)/python -m tests.soak.run

fmt: $(VENV)/.installed-dev  ## put the style right where a tool can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

dist: $(VENV)/.installed-dev  ## build the wheel and the sdist into dist/
	@$(BIN)/python -m hatchling build --clean

bench: $(VENV)/.installed-dev  ## measure beside others, in environments of their own: benchmarks/results.json, charts; about 33 minutes
	@$(BIN)/python benchmarks/bench.py

bench-quick: $(VENV)/.installed-dev  ## measure the service and the floors: about two minutes
	@$(BIN)/python benchmarks/bench.py --quick

compare-tf: $(VENV)/.installed-dev  ## run two programs in TensorFlow and here, and print the largest difference
	@$(BIN)/python benchmarks/compare_tf.py

clean:  ## remove all that was made here, the virtual environment too
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache benchmarks/results.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than pyproject.toml when the environment has what it asks for.
$(VENV)/.installed-demo: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV), once: about half a minute"
	@$(INSTALL) -e '.[examples]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing what development needs into $(VENV), once: about half a minute"
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-interop: $(VENV)/.installed-dev
	@echo "installing torch, grain and datasets into $(VENV), once"
	@$(INSTALL) torch==2.13.0
	@$(INSTALL) -e '.[interop]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	@echo "installing mkdocs into $(VENV), once"
	@$(INSTALL) -e '.[docs]'
	@touch $@

# The pip that a Python brings is years old, and takes twice as long to choose versions.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "central-storage needs Python 3.11 or later, and '$(PYTHON)' is not one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --upgrade pip
