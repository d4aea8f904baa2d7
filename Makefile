# Two commands from a clean checkout, with nothing but Python >= 3.11 and a C++ compiler: make demo, make test.
#
# The first one makes .venv and installs into it what was tested (constraints.txt); llama.cpp is compiled then,
# which takes some minutes, once. `make test VENV=` uses the Python that is active instead, and installs nothing.

PYTHON ?= python3
VENV ?= .venv
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

ifeq ($(strip $(VENV)),)
  BIN :=
  STAMP :=
  HF :=
  PY := $(PYTHON)
else
  BIN := $(VENV)/bin/
  STAMP := $(VENV)/.installed
  HF := $(VENV)/.installed-hf
  PY := $(BIN)python
endif

.PHONY: help install wheel demo test test-all lint types docs check format clean

help:
	@echo "make demo      a code edit on a real model, with and without drafting"
	@echo "make test      the tests, without the long grids"
	@echo "make test-all  all tests"
	@echo "make lint      ruff check, ruff format --check"
	@echo "make types     mypy"
	@echo "make docs      run the code of the documentation"
	@echo "make check     lint, types and test (which runs the documentation too)"
	@echo "make format    let ruff format the sources"
	@echo "make install   make $(or $(VENV),nothing: VENV is empty) (the others do it as needed)"
	@echo "make wheel     compile llama.cpp into WHEELS=FOLDER, for PIP_FIND_LINKS=FOLDER make install"
	@echo "make clean     remove what was made, .venv included; models stay in their cache"

install: $(STAMP) $(HF)

# Where a processor has AMX, llama.cpp is compiled without it: older GCCs (12.2 is one) drop all of a tile's configuration but
# its first eight bytes, and the first product of a quantised model ends the process with "Illegal instruction". pip keeps what
# it compiled and gives it out again whatever the flags, so that is not used either.
ifneq ($(shell c++ -march=native -dM -E -x c++ /dev/null 2>/dev/null | grep __AMX_TILE__),)
wheel $(STAMP): export CFLAGS += -mno-amx-tile -mno-amx-int8
wheel $(STAMP): export CXXFLAGS += -mno-amx-tile -mno-amx-int8
wheel $(STAMP): export PIP_NO_CACHE_DIR := 1
endif

wheel:
	@test -n "$(WHEELS)" || { echo "Name the folder for it: make wheel WHEELS=FOLDER" >&2; exit 1; }
	$(PYTHON) -m pip wheel --quiet --no-deps -w "$(WHEELS)" "$$(grep '^llama-cpp-python==' constraints.txt)"

demo: $(STAMP)
	$(BIN)paceline demo

test: $(STAMP) $(HF)
	$(PY) -m pytest -q -m "not slow"

test-all: $(STAMP) $(HF)
	$(PY) -m pytest -q

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP) $(HF)
	$(PY) -m mypy

docs: $(STAMP)
	$(PY) -m pytest -q tests/test_docs.py

check: lint types test

format: $(STAMP)
	$(PY) -m ruff format .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(STAMP),)
# Made last, so that an installation that was interrupted is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Paceline needs Python 3.11 or newer; $(PYTHON) is older. Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "llama.cpp needs a C++ compiler, and there is none (Debian: apt install g++; macOS: xcode-select --install)" >&2; exit 1; }
	@test -x $(BIN)python || $(PYTHON) -m venv $(VENV) || \
	  { echo "python -m venv failed (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "Installing into $(VENV); compiling llama.cpp takes some minutes, this once"
	$(BIN)python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[llamacpp,dev]'
	@touch $@

# PyTorch and transformers, for the tests of their backend. A torch that is there already is kept.
$(HF): $(STAMP)
	$(BIN)python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	@touch $@
endif
