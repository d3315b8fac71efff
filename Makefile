# Every target sets up what it needs: a virtual environment in .venv with the pinned versions of cluster/constraints.txt.
# Only Python 3.11 or newer with pip is expected of the machine.

PYTHON ?= python3
# Package index from which torch is installed first, for example https://download.pytorch.org/whl/cpu; see README.md.
TORCH_INDEX ?=
# Processes that share the tests; on two cores three, because many tests wait for processes, servers and leases.
JOBS ?= 3

BIN := .venv/bin
# What running needs, and what tests, checks, benchmarks and pages need beside it.
STAMP := .venv/.installed
DEV := .venv/.installed-dev
COMPILED := .venv/.compiled
# What makes this processor compute like another one, such as ATEN_CPU_CAPABILITY=default; see docs/contributing.md.
PROCESSOR ?=
PYTEST := OMP_NUM_THREADS=1 $(PROCESSOR) $(BIN)/python -m pytest -q
SPREAD := --dist loadfile --no-loadscope-reorder

# The processes that tests start, some thousand, would otherwise compile the package each anew where this is set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo compare lint check test test-all nightly bench docs clean
.DELETE_ON_ERROR:

install: $(COMPILED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else sys.executable + " is Python " + sys.version.split()[0] + "; ltrscale needs 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv || { $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install pip; }

PIP_INSTALL := $(BIN)/python -m pip install --no-compile -c cluster/constraints.txt
INSTALL := $(if $(TORCH_INDEX),$(PIP_INSTALL) --index-url $(TORCH_INDEX) --no-deps torch && )$(PIP_INSTALL) -e

$(STAMP): pyproject.toml cluster/constraints.txt | $(BIN)/python
	$(INSTALL) .
	touch $@

$(DEV): pyproject.toml cluster/constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev]'
	touch $(STAMP) $@

# On all cores; pip would use one. Other targets compile what they import. One package has templates that are no Python.
$(COMPILED): $(DEV)
	$(BIN)/python -m compileall -q -j 0 -x '/tests?/' .venv/lib >/dev/null || true
	touch $@

# The best ranker of a made-up log, in two minutes.
demo: $(STAMP)
	$(BIN)/python -m jobs.prepare --config jobs/configs/start/prepare-demo.yaml
	$(BIN)/python -m jobs.auto --config jobs/configs/start/auto-demo.yaml

# Four methods on that log, over five draws of its labels. One thread, because sums of several are rounded differently, and
# the table of docs/results/demo.md is to come out.
compare: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m jobs.pipeline --config jobs/configs/start/demo.yaml

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy cluster/*.py
	$(BIN)/lint-imports --no-logo

# Two to three minutes on two cores: style, types, import contracts, doctests, README.md's Python blocks, the fast tests.
check: lint
	$(PYTEST) -m "not slow and not nightly and not ray and not s3" -n 2 $(SPREAD) --doctest-modules ltrscale jobs tests

# Every law, and the pages that a newcomer reads. Both parts run, whatever fails; the last line names those that did.
test: $(DEV)
	@failed=; \
	for part in lint test-all; do $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	[ -z "$$failed" ] || { echo "make test: failed:$$failed" >&2; exit 1; }

test-all: $(DEV)
	$(PYTEST) -m "not nightly" -n $(JOBS) $(SPREAD) --doctest-modules ltrscale jobs tests

# The laws once more, at other moments, delays and sizes, and those of drawn examples with more of them.
nightly: $(DEV)
	$(PYTEST) -m "nightly or hypothesis" --hypothesis-profile night -n 2 $(SPREAD) tests

# Speed and memory against peers, each figure logged as soon as it is measured.
bench: $(DEV)
	$(BIN)/python -m jobs.bench

# The documentation as a site that opens from disk: build/docs/index.html.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Removes what was installed and cached; results below runs/ stay.
clean:
	rm -rf .venv build dist *.egg-info .hypothesis .cache .*_cache
	find ltrscale jobs tests -type d -name __pycache__ -prune -exec rm -rf {} +
