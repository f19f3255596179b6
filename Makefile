# Everything from a fresh clone: `make demo` shows it working, `make test` checks it, `make test-all` checks it all.
# PYTHON is only used to make .venv; all the rest runs from there.
PYTHON ?= python3.11
BIN := .venv/bin
CXX_FILES := $(shell find csrc tests/ascend examples/setup -name '*.h' -o -name '*.cpp')
ROUNDS ?= 1000
# make demo: MODE=pull copies the blocks, TP=2 has two workers on either side, HOSTS=2 two network namespaces (as root).
MODE ?= auto
TP ?= 1
HOSTS ?= 1
SEED ?=
# make fuzz: inputs for every decoder.
RUNS ?= 1000000

.PHONY: setup demo test test-all fmt lint types docs native test-wheel fuzz fuzz-mutants chaos chaos-mutants
.PHONY: bench-native bench-handoff bench-serve clean

# Takes no time when nothing it depends on has changed.
setup:
	@$(PYTHON) examples/setup/setup_dev.py
	@$(BIN)/python examples/setup/models.py

demo: setup
	@$(BIN)/python -m examples.demo --mode $(MODE) --tp $(TP) --hosts $(HOSTS)

# Every kind of check in a quarter of an hour: what is not marked slow. CONTRIBUTING.md says what that leaves out.
test: setup
	@$(BIN)/python -m tests.checks

# Every check and test there is: before a release, after a change of vLLM, and nightly.
test-all: setup
	@$(BIN)/python -m tests.checks --all

fmt:
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

lint:
	$(BIN)/ruff check .
	$(BIN)/codespell

types:
	$(BIN)/mypy

# The C++ code by itself, under each sanitizer; and clang-tidy. Ninja and clang-tidy come from .venv.
native: export PATH := $(CURDIR)/$(BIN):$(PATH)
native:
	@mkdir -p build/logs
	@for preset in asan tsan tidy; do cmake --preset $$preset > build/logs/cmake-$$preset.log || exit 1; done
	@run-clang-tidy.py -p build/tidy -quiet "$(CURDIR)/csrc/.*"
	@cmake --build --preset asan && cmake --build --preset tsan
	@ctest --preset asan --progress -j2 && ctest --preset tsan --progress -j2

# One target alone: .venv/bin/python -m tests.fuzz --target NAME; what fails is kept in build/fuzz.
fuzz: export PATH := $(CURDIR)/$(BIN):$(PATH)
fuzz: setup
	@$(BIN)/python -m tests.fuzz --runs $(RUNS) $(if $(SEED),--seed $(SEED))

# Proof that the fuzzers find bugs: copies of the package with one each.
fuzz-mutants: export PATH := $(CURDIR)/$(BIN):$(PATH)
fuzz-mutants: setup
	@$(BIN)/python -m tests.fuzz.mutants --native

# The site, in build/site. Not with --quiet: that hides the warnings from --strict.
docs:
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Real engine processes under seeded kills, stops, aborts and restarts. A failing round is repeated alone with
# .venv/bin/python -m tests.chaos --only ROUND --seed SEED
chaos: setup
	@$(BIN)/python -m tests.chaos --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

# Proof that the harness finds bugs: copies of the package with one each.
chaos-mutants: setup
	@$(BIN)/python -m tests.chaos.mutants

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
