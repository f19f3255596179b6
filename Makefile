# Everything from a fresh clone: `make demo` shows it working, `make test` runs every check.
# PYTHON is only used to make .venv; all the rest runs from there.
PYTHON ?= python3.11
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
CXX_FILES := $(shell find csrc tests/ascend examples/setup -name '*.h' -o -name '*.cpp')
CHECKS := fmt lint types docs native unit fuzz-short isolation connector ascend bench-code chaos-short e2e
ROUNDS ?= 1000
# make demo: MODE=pull copies the blocks, TP=2 has two workers on either side, HOSTS=2 two network namespaces (as root).
MODE ?= auto
TP ?= 1
HOSTS ?= 1
SEED ?=
# make fuzz: inputs for every decoder.
RUNS ?= 1000000

.PHONY: setup demo test test-wheel fuzz fuzz-mutants chaos chaos-mutants bench-native bench-handoff bench-serve clean $(CHECKS)

# Takes no time when nothing it depends on has changed.
setup:
	@$(PYTHON) examples/setup/setup_dev.py
	@$(BIN)/python examples/setup/models.py

demo: setup
	@$(BIN)/python -m examples.demo --mode $(MODE) --tp $(TP) --hosts $(HOSTS)

test: setup
	@$(MAKE) --no-print-directory $(CHECKS)
	@echo "test: all passed ($(CHECKS))"

fmt:
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

lint:
	$(BIN)/ruff check .
	$(BIN)/codespell

types:
	$(BIN)/mypy

# The C++ core by itself, under each sanitizer; then the binding. Ninja and clang-tidy come from .venv.
native: export PATH := $(CURDIR)/$(BIN):$(PATH)
native:
	@mkdir -p build/logs
	@for preset in asan tsan; do \
		cmake --preset $$preset > build/logs/cmake-$$preset.log && \
		cmake --build --preset $$preset && \
		ctest --preset $$preset --progress || exit 1; \
	done
	@cmake --preset tidy > build/logs/cmake-tidy.log && cmake --build --preset tidy
	@run-clang-tidy.py -p build/tidy -quiet "$(CURDIR)/csrc/.*"
	$(PYTEST) tests/native

unit:
	$(PYTEST) tests/unit tests/cli tests/docs tests/ipc tests/network tests/tensors tests/proxy tests/packaging tests/deploy

# Every decoder for a few seconds, and what was found before. In C++ with libFuzzer out of atheris' wheel.
fuzz-short: export PATH := $(CURDIR)/$(BIN):$(PATH)
fuzz-short:
	$(PYTEST) tests/fuzz

# One target alone: .venv/bin/python -m tests.fuzz --target NAME; what fails is kept in build/fuzz.
fuzz: export PATH := $(CURDIR)/$(BIN):$(PATH)
fuzz: setup
	@$(BIN)/python -m tests.fuzz --runs $(RUNS) $(if $(SEED),--seed $(SEED))

# Proof that the fuzzers find bugs: copies of the package with one each.
fuzz-mutants: export PATH := $(CURDIR)/$(BIN):$(PATH)
fuzz-mutants: setup
	@$(BIN)/python -m tests.fuzz.mutants --native

# Engines with namespaces of their own, as containers have them. Other users and namespaces take root; skipped without.
isolation:
	$(PYTEST) tests/isolation

# The site, in build/site. Not with --quiet: that hides the warnings from --strict.
docs:
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The benchmarks' own code; what they measure is nobody's test.
bench-code:
	$(PYTEST) tests/bench

connector:
	$(PYTEST) tests/connector

# Over a simulator of libascendcl.so, with torch_npu's and vllm-ascend's real code, unpacked and not installed.
ascend: export PATH := $(CURDIR)/$(BIN):$(PATH)
ascend:
	$(PYTEST) tests/ascend

# About twenty rounds of what `make chaos` does.
chaos-short:
	$(PYTEST) tests/chaos

# Real engine processes under seeded kills, stops, aborts and restarts. A failing round is repeated alone with
# .venv/bin/python -m tests.chaos --only ROUND --seed SEED
chaos: setup
	@$(BIN)/python -m tests.chaos --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

# Proof that the harness finds bugs: copies of the package with one each.
chaos-mutants: setup
	@$(BIN)/python -m tests.chaos.mutants

e2e:
	$(PYTEST) tests/e2e

# The same tests against the wheel, where the package's source cannot be imported.
test-wheel: setup
	@$(BIN)/python examples/setup/wheels.py
	@$(BIN)/python -m tests.packaging.installed

# The environment stays: rm -r .venv to be rid of it too.
clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# What a claim, a release, a publication cost in the C++ core.
bench-native: export PATH := $(CURDIR)/$(BIN):$(PATH)
bench-native: setup
	@mkdir -p build/logs
	@cmake --preset tests > build/logs/cmake-tests.log && cmake --build --preset tests
	@build/tests/csrc/tests/native_bench

# Hand-overs of 16 MiB to 8 GiB beside everything that copies; QUICK=1 takes a minute.
bench-handoff: setup
	@mkdir -p build/bench
	@$(BIN)/vllm-mc2 bench handoff --json build/bench/handoff.json --output-dir build/bench $(if $(QUICK),--quick)

# Real servers, about half an hour. Their busy waiting is tamed as in the demo, for every system alike.
bench-serve: export PYTHONPATH := $(CURDIR)/examples/setup/quiet:$(PYTHONPATH)
bench-serve: setup
	@mkdir -p build/bench
	@$(BIN)/vllm-mc2 bench serve --fat --fat-lengths 1024,2048,4096 --model build/models/smollm2-135m-instruct \
		--lengths 256,1024 --json build/bench/serve.json --output-dir build/bench $(if $(QUICK),--quick)
