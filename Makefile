# `make demo` and `make test` do all their own set-up: Python 3.11+, make and git are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(VENV)/.installed-lab
DEV := $(VENV)/.installed-dev
PROCESSES := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo quick oldest matrix test browser docs dist check format lint types imports clean help

help:
	@echo "make demo    set up, then show on digits what the filter does (about two minutes)"
	@echo "make quick   set up, then run the tests of the core (under a minute)"
	@echo "make oldest  the same with the oldest torch that is claimed, which it installs (some gigabytes, kept)"
	@echo "make matrix  the same with every torch that is claimed; makes the support tables"
	@echo "make test    set up (a browser too), then run every test"
	@echo "make docs    build the site into site/; open site/index.html"
	@echo "make dist    build wheel and sdist into dist/, and run an example from them in a new environment"
	@echo "make check   format, lint, types, import layers, tests: what CI runs"
	@echo "make format  let ruff rewrite the code"

# torch first and on its own: a looser request may fetch gigabytes of GPU libraries.
$(LAB): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "dome needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(PIP) torch
	@$(PIP) -e '.[lab]'
	@touch $@

# What only tests, checks and pages need: make demo does not wait for it.
$(DEV): $(LAB)
	@echo "Installing what the tests need ..."
	@$(PIP) -e '.[dev]'
	@touch $@

demo: $(LAB)
	@$(BIN)/dome demo

# A process a core with one thread each: twice as fast on two cores as two threads in one. Where
# a test takes two threads all the same, they do not spin for a core that is not free. One
# process more fills the time in which tests wait, for workers that were killed or a browser.
# Bytecode is kept whatever the environment says: tests start some hundred programs.
quick: $(DEV)
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q -m "not slow" \
	  tests/trackers tests/samples tests/test_filter.py tests/compression

test: $(DEV) browser
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --junitxml=$(VENV)/tests.xml

# The tests of the report open it in headless Chromium. As root on Debian it is installed;
# elsewhere one that is there is taken, or Playwright's own. Without any, the tests say so.
browser: $(DEV)
	@test -n "$$DOME_CHROMIUM" || command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	|| command -v google-chrome >/dev/null || command -v google-chrome-stable >/dev/null \
	|| { echo "Installing Chromium for the tests of the report ..."; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	  then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	  else $(BIN)/playwright install chromium >/dev/null; fi; } \
	|| echo "No Chromium could be installed: set DOME_CHROMIUM to one, or the tests of the report are skipped."

# Some gigabytes and minutes for each version the first time; kept in ~/.cache/dome-matrix.
oldest: $(DEV)
	@$(BIN)/python tools/matrix.py oldest --suite quick

# After make test, what it found is not run again: make matrix REPORT=.venv/tests.xml
matrix: $(DEV)
	@$(BIN)/python tools/matrix.py $(if $(REPORT),--report $(REPORT)); status=$$?; \
	  $(BIN)/python tools/support_table.py && exit $$status

docs: $(DEV)
	@PYTHONPATH=website $(BIN)/zensical build --strict --clean
	@echo "site/index.html; with search: $(BIN)/python -m http.server -d site"

dist: $(DEV)
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist
	@DOME_DIST=dist $(BIN)/python -m pytest -q -p no:cacheprovider tests/test_distribution.py

check: format-check lint types imports test

format-check: $(DEV)
	@$(BIN)/ruff format --check .

lint: $(DEV)
	@$(BIN)/ruff check .

types: $(DEV)
	@$(BIN)/mypy

imports: $(DEV)
	@$(BIN)/lint-imports

format: $(DEV)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
