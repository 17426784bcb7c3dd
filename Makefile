# make run    the main job: a real service, measured, adapting to a changing grid
# make test   everything that can be checked on this machine
# make test-ray   the engine on Ray Serve, beside a Ray cluster, in an environment of its own
# Each sets up .venv by itself; nothing is needed but Python 3.11+, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: run test test-ray lint bench docs lock clean help

help:
	@sed -n 's/^# //p' Makefile

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"joulery needs Python 3.11 or newer, found {v.major}.{v.minor}: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python requirements/run.txt pyproject.toml
	@echo "setting up $(VENV): what running needs"
	$(PIP) install --require-hashes --no-deps -r requirements/run.txt
	$(PIP) install --no-deps -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements/dev.txt requirements/lengths.txt requirements/llm.txt
	@echo "setting up $(VENV): what testing needs"
	$(PIP) install --require-hashes --no-deps -r requirements/dev.txt -r requirements/lengths.txt -r requirements/llm.txt
	@touch $@

run: $(VENV)/.run
	$(BIN)/joulery up examples/quickstart.yaml

test: $(VENV)/.dev lint
	$(BIN)/pytest -n 2 --dist loadgroup --cov --cov-report=term:skip-covered

# Ray first, joulery and what else it needs behind it: what Ray pins is Ray's, everything else is the lock's.
$(VENV)-ray/.done: $(VENV)/.dev requirements/ray.txt
	@echo "setting up $(VENV)-ray: Ray Serve"
	$(PYTHON) -m venv $(VENV)-ray
	$(VENV)-ray/bin/pip --disable-pip-version-check --quiet install -r requirements/ray.txt
	$(VENV)-ray/bin/python -c 'import site, sys; open(site.getsitepackages()[0] + "/joulery.pth", "w").write("\n".join(sys.argv[1:]))' \
	  $(CURDIR)/src "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	@touch $@

test-ray: $(VENV)-ray/.done
	$(VENV)-ray/bin/python -m pytest -m ray tests/contract

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks --write

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

# The lock: every pinned version with its hashes, for all platforms. Needs uv.
lock:
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header pyproject.toml --extra dev --extra vision --extra docs --extra nvidia --extra llm -o requirements/dev.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header pyproject.toml --extra vision --extra nvidia -c requirements/dev.txt -o requirements/run.txt

clean:
	rm -rf $(VENV) $(VENV)-ray .mypy_cache .ruff_cache .pytest_cache .hypothesis site runs
