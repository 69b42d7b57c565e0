# Every command a developer needs. `make run` and `make test` set up .venv by themselves; nothing outside it is changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

SOURCES := pyproject.toml README.md LICENSE CMakeLists.txt native/CMakeLists.txt \
  $(shell find src native -type f \( -name '*.py' -o -name '*.pyi' -o -name '*.cpp' -o -name '*.h' -o -name 'py.typed' \))

# A tree that has been set up for development stays so: `make run` then uses the development build.
ifneq ($(wildcard $(VENV)/octavo-dev),)
  INSTALLED := $(VENV)/octavo-dev
else
  INSTALLED := $(VENV)/octavo
endif

CMAKE_NATIVE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
  -DOCTAVO_NATIVE_TESTS=ON -DOCTAVO_DEV=ON

.DEFAULT_GOAL := help
.PHONY: help run test native-test lint sim exact grammar chaos load parity sanitize compare fuzz clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

run: $(INSTALLED) ## install Octavo in .venv, fetch the default model, answer a question
	$(BIN)/octavo chat --temperature 0 --system "Answer in one short sentence." "What is the capital of France?"

test: $(VENV)/octavo-dev native-test ## native tests, then all Python tests
	$(BIN)/python -m pytest -n 2 --dist loadfile  # two files at a time: much of it is waiting

native-test: $(VENV)/tools
	$(CMAKE_NATIVE) -B build/native-tests
	$(BIN)/cmake --build build/native-tests -j $(JOBS)
	$(BIN)/ctest --test-dir build/native-tests --output-on-failure -j $(JOBS)

lint: $(VENV)/octavo-dev ## ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(filter %.cpp %.h,$(SOURCES))
	$(BIN)/mypy

sim: $(VENV)/octavo-dev ## a million simulated scheduler steps, and ten planted bugs that must be found
	$(BIN)/python -m tests.sim

exact: $(VENV)/octavo-dev ## the full exactness suite: equal bits whatever happens around a request
	$(BIN)/python -m tests.exact

grammar: $(VENV)/octavo-dev ## outputs of 500 random JSON schemas, jump-forward on and off, validated by jsonschema
	$(BIN)/python -m tests.grammar.validate

chaos: $(VENV)/octavo-dev ## the engine killed 50 times and stopped 20 times under 16 streams: no bit changes
	$(BIN)/python -m tests.server.chaos

load: $(VENV)/octavo-dev ## 64 streams for ten minutes through octavo serve, some clients leaving: nothing grows
	$(BIN)/python -m tests.server.load

parity: .venv-parity/octavo ## remake the golden files with PyTorch and transformers, and compare
	.venv-parity/bin/python -m tests.parity.check

sanitize: $(VENV)/tools ## native tests under ASan and UBSan, the thread team and a whole step under TSan
	$(CMAKE_NATIVE) -B build/asan -DOCTAVO_SANITIZE=address,undefined
	$(BIN)/cmake --build build/asan -j $(JOBS)
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(BIN)/ctest --test-dir build/asan --output-on-failure -j $(JOBS)
	$(CMAKE_NATIVE) -B build/tsan -DOCTAVO_SANITIZE=thread
	$(BIN)/cmake --build build/tsan -j $(JOBS) --target test_team test_executor
	$(NO_ASLR) build/tsan/native/tests/test_team
	$(NO_ASLR) build/tsan/native/tests/test_executor

compare: $(VENV)/octavo-dev ## Octavo beside its peers, for about an hour; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.peers.setup
	$(BIN)/python -m benchmarks.compare

fuzz: $(VENV)/octavo-dev ## damaged model files against the loaders, strange values in every field of every route
	$(BIN)/python -m tests.fuzz.loaders --seconds 120
	$(BIN)/python -m tests.fuzz.fields

clean: ## remove what the other commands made
	rm -rf build dist $(VENV) .venv-parity .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Some kernels place a program where ThreadSanitizer cannot run; without address randomisation it always can.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)

# --- set-up; each stamp file is newer than what it was made from ---

$(VENV)/ready:
	@sh scripts/check-machine.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Built in pip's own isolated environment; the build folder is kept, so that a second build is short.
$(VENV)/octavo: $(VENV)/ready $(SOURCES)
	@echo "Installing Octavo in $(VENV): compiling takes a minute or two ..."
	$(PIP) .
	@touch $@

# Development: the build's own tools lie in .venv, so that a rebuild downloads nothing; warnings are errors; symbols
# stay, for tests that read the disassembly.
$(VENV)/tools: $(VENV)/ready pyproject.toml
	eval "$(PIP) 'pip>=23.1' $$(sed -n 's/", "/" "/g; s/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml)"
	@touch $@

$(VENV)/octavo-dev: $(VENV)/tools $(SOURCES)
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation \
	  -C build-dir=build/dev -C cmake.define.OCTAVO_DEV=ON -C install.strip=false ".[dev]"
	@touch $@

.venv-parity/octavo: $(VENV)/ready $(SOURCES)
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install --disable-pip-version-check -q ".[dev,parity]"
	@touch $@
