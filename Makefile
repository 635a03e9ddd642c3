# The project's commands, which .ci/run calls, too. Needs make and Python 3.11 or later.

PYTHON ?= python3
VENV   ?= .venv
# One more than the processors of the smallest machine that runs the tests, because many tests wait.
JOBS   ?= 3
# The version of Ray in test-ray: the newest that the project takes, or for example the oldest, RAY=2.52.0.
RAY    ?=
BIN    := $(VENV)/bin
# The tests of a file share services, so they run in one process. The files with the most tests come first.
PYTEST  = $(BIN)/python -m pytest -p tests.harness.progress -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# The folders that make check leaves out: their tests start services, or need all kernels, which take a minute to compile
# the first time. It also leaves out tests that are marked long.
SYSTEM := conformance gpu harness interop processes ray seeds server/compute soak
CHECK  := -m "not slow and not long" --hypothesis-profile=sample
DEMO   := cs-launch --devices cpu:0,cpu:1 --parameter-device cpu:0 examples/digits.py

# pip prints only errors.
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1
export PIP_ROOT_USER_ACTION = ignore
export PIP_QUIET = 2
# Without --no-compile, pip compiles every module, which takes longer than the installation. Most are never imported.
INSTALL = $(BIN)/python -m pip install --no-compile --only-binary=:all:
# Silences a notice of Material for MkDocs about another project of its authors.
export NO_MKDOCS_2_WARNING = 1
# If this were set, every process that a test starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo setup setup-locked lock check test test-slow test-properties test-zeromq test-containers test-interop test-ray test-tools test-soak test-pythons test-all \
        lint pytest fmt docs docs-serve dist soak mutants bench bench-quick bench-models compare-tf compare-torch compare-jax clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(VENV)/.installed-demo  ## train the handwritten digits on two workers and one parameter process
	PATH="$(abspath $(BIN)):$$PATH" $(DEMO)

setup: $(VENV)/.installed-dev  ## create the virtual environment for development

setup-locked: | $(BIN)/python  ## the same, with exactly the files whose hashes requirements-dev.lock has
	@$(INSTALL) --require-hashes -r requirements-dev.lock
	@$(INSTALL) --no-deps --no-build-isolation --no-index -e .
	@touch $(VENV)/.installed-dev $(VENV)/.installed-demo

lock:  ## write requirements-dev.lock anew, for every Python and machine; needs uv, and a package index
	@printf 'editables\npip\n' | uv pip compile pyproject.toml - --extra dev --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --quiet > build-lock.tmp
	@{ sed -n '/^#/p' requirements-dev.lock; cat build-lock.tmp; } > requirements-dev.lock.new
	@rm build-lock.tmp && mv requirements-dev.lock.new requirements-dev.lock

check: $(VENV)/.installed-dev  ## style, types, contracts, and the quick tests that start no service: a minute and a half
	@$(MAKE) --no-print-directory -j2 lint pytest IGNORED="$(SYSTEM)" CHOSEN='$(CHECK)'

test: $(VENV)/.installed-dev  ## check, the long tests, and the tests of the whole system: below twenty minutes
	@$(MAKE) --no-print-directory -j2 lint pytest IGNORED="interop ray soak" CHOSEN=--hypothesis-profile=sample

test-slow: $(VENV)/.installed-dev  ## the slow tests: programs in threads and on stand-in GPUs, a death at every event, ...
	@$(PYTEST) -m slow --ignore=tests/interop --ignore=tests/ray --ignore=tests/soak

test-properties: $(VENV)/.installed-dev  ## every property with fifty times as many examples as test uses
	@$(PYTEST) -m hypothesis --hypothesis-profile=full --timeout=600 --ignore=tests/interop --ignore=tests/ray --ignore=tests/soak

test-zeromq: $(VENV)/.installed-dev  ## the tests of whole services again, with every message over ZeroMQ
	@CS_MAILBOXES=off $(PYTEST) tests/conformance tests/processes

test-containers: $(VENV)/.installed-dev  ## docker-compose with a real engine, which is installed and started if permitted
	@tests/containers/run $(BIN)/python $(if $(IF_POSSIBLE),--if-possible)

test-interop: $(VENV)/.installed-interop  ## replica functions in torch and JAX, and data sets of torch, grain and Hugging Face, which are installed first
	@$(PYTEST) tests/interop client/central_storage/torch --ignore=tests/interop/jax
	@$(PYTEST) tests/interop/jax client/central_storage/jax  # in a process of its own: with JAX's threads, a fork of a DataLoader is a warning

test-ray: $(VENV)/.installed-ray$(RAY)  ## Ray, which is installed first (RAY=2.52.0: the oldest): workers that it places, actors, trials of Tune, Train and Data
	@$(PYTEST) -n 2 tests/ray  # each of the two has nodes of Ray of its own

test-tools: docs  ## a browser reads the documentation site; it is installed if permitted, otherwise the tests are skipped
	@tests/tools/run $(BIN)/python

test-soak: $(VENV)/.installed-dev  ## a sample of the soak: each promise a few times, and guarantees broken on purpose
	@$(PYTEST) tests/soak

test-pythons: $(VENV)/.installed-dev  ## the wheel under every other Python that is installed
	@CS_PYTHONS=1 $(BIN)/python -m pytest tests/pythons

test-all:  ## all tests above
	@for tier in test test-slow test-properties test-zeromq test-interop "test-ray RAY=2.52.0" test-ray test-tools test-soak test-pythons "test-containers IF_POSSIBLE=1"; do \
		$(MAKE) --no-print-directory $$tier || exit; \
	done

# Prints only errors, because it runs beside the tests, which show their progress.
lint: $(VENV)/.installed-dev  ## style, types and contracts, without the tests
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@said=$$($(BIN)/lint-imports) || { echo "$$said"; exit 1; }

pytest: $(VENV)/.installed-dev
	@$(PYTEST) $(CHOSEN) $(IGNORED:%=--ignore=tests/%)

docs: $(VENV)/.installed-docs  ## build the documentation site in build/site; fails on a broken link or an incomplete docstring
	@said=$$($(BIN)/python -m mkdocs build 2>&1) || { echo "$$said"; exit 1; }
	@$(BIN)/python -m pytest --quiet tests/test_reference.py

docs-serve: $(VENV)/.installed-docs  ## serve the documentation site at http://127.0.0.1:8000, and rebuild it after every change
	@$(BIN)/python -m mkdocs serve --watch client --watch docs

soak: $(VENV)/.installed-dev  ## thousands of training sessions with killed and stopped processes and lost messages; continues after an interruption
	@$(BIN)/python -m tests.soak.run

mutants: $(VENV)/.installed-dev  ## break about 200 lines that keep promises, one at a time: a test must fail each time; continues after an interruption
	@$(BIN)/python -m tests.mutants.run

fmt: $(VENV)/.installed-dev  ## fix style problems automatically
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

dist: $(VENV)/.installed-dev  ## build the wheel and the sdist into dist/; the same bytes for the same tree
	@SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(BIN)/python -m hatchling build --clean

bench: $(VENV)/.installed-interop  ## compare speed with other systems: goals, benchmarks/results.json and charts; below 40 minutes
	@$(BIN)/python benchmarks/bench.py

bench-quick: $(VENV)/.installed-dev  ## measure the service and the lower bounds: about two minutes
	@$(BIN)/python benchmarks/bench.py --quick

bench-models: $(VENV)/.installed-interop  ## whole models beside torch, DDP, Hogwild and JAX: benchmarks/models.json and a chart; about twelve minutes
	@$(BIN)/python benchmarks/bench_models.py

compare-tf: $(VENV)/.installed-dev  ## run two programs in TensorFlow and here, and print the largest difference
	@$(BIN)/python benchmarks/compare_tf.py

compare-torch: $(VENV)/.installed-interop  ## train three models with torch alone and here, and print the largest differences
	@$(BIN)/python examples/torch_models/compare.py

compare-jax: $(VENV)/.installed-interop  ## train two models with JAX alone and here, and print the largest differences
	@$(BIN)/python examples/jax_models/compare.py

clean:  ## remove all generated files and the virtual environment
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache benchmarks/results.json benchmarks/models.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp that is newer than pyproject.toml says that the environment is up to date.
$(VENV)/.installed-demo: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV), once: about half a minute"
	@$(INSTALL) -e '.[examples]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing the development packages into $(VENV), once: about half a minute"
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-interop: $(VENV)/.installed-dev
	@echo "installing torch, jax, flax, equinox, grain and datasets into $(VENV), once"
	@$(INSTALL) torch==2.13.0
	@$(INSTALL) -e '.[interop]'
	@touch $@

$(VENV)/.installed-ray$(RAY): $(VENV)/.installed-dev
	@echo "installing ray$(RAY:%= %) into $(VENV), once"
	@$(INSTALL) --upgrade -e '.[ray-train,ray-tune]' 'ray$(if $(RAY),==$(RAY))'
	@rm -f $(VENV)/.installed-ray* && touch $@  # one version at a time

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	@echo "installing mkdocs into $(VENV), once"
	@$(INSTALL) -e '.[docs]'
	@touch $@

# The pip that comes with Python is years old and takes twice as long to resolve versions.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "central-storage needs Python 3.11 or later, and '$(PYTHON)' is not one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --upgrade pip
