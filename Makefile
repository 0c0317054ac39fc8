# make check | demo | report | report-full | test | test-all | test-peers | fuzz | docs | lint | wheel | tools | tools-ik | sanitize |
# cuda-check | vulkan-check | vulkan-acceptance: everything they need is set up first, in .venv.
# make/test.mk has tests and linters, make/release.mk pages, wheels and tools.
# Needs Python >= 3.10, a C++ compiler, make and git; cmake and ninja come from PyPI.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check --quiet
INSTALL := $(BIN)/python native/install.py
export PATH := $(CURDIR)/$(BIN):$(PATH)

# what make report writes: report.md, report.html, report/*.png and *.svg, records.jsonl; passkeys/, the demo's table in full
REPORT ?= build/report

# one package for all builds: the one that the library's own build has fetched
TARBALL   = $(addprefix $(CURDIR)/,$(firstword $(wildcard build/*/download/*.tar.gz)))

# nvcc, where there is one, and what the toolkit lacks where it comes from PyPI
NVCC      = $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUBLAS    = nvidia-cublas==13.*
HAS_CUBLAS = $(wildcard /usr/local/cuda/include/cublas_v2.h)

.DEFAULT_GOAL := build
.PHONY: build demo report report-full clean

$(BIN)/pip:
	@echo "[1/7] build tools: cmake, ninja, scikit-build-core, cffi"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip

$(VENV)/.build-tools: $(BIN)/pip pyproject.toml
	$(PIP) install cmake ninja scikit-build-core cffi
	touch $@

# an editable install: Python files from here, the library rebuilt as far as needed
build: $(VENV)/.build-tools
	$(INSTALL) --editable .[cli]

PASSKEY := $(BIN)/pylongctx eval passkey --method full --method selfextend --method longheads

# a minute on two cores: five trials a cell, and make report has fifty; then about four in which SmolLM2, which is fetched (94 MiB), reads a
# novel
demo: build
	$(PASSKEY) --lengths 512,1024,2048,4096 --tests 5
	$(BIN)/python bench/book.py

# every method on the embedded model: tables and pictures; what is there already is not measured again
report: build
	$(INSTALL) --editable .[plot,eval]
	$(BIN)/pylongctx matrix bench/matrix.toml --out $(REPORT) --workers auto
	$(BIN)/pylongctx report $(REPORT)
	mkdir -p $(REPORT)/passkeys
	$(PASSKEY) --lengths 512,1024,2048,4096,8192 --tests 50 --json $(REPORT)/passkeys/records.jsonl

# real models on the public files of DATA, for hours; what is there already is not measured again
FULL ?= build/report-full
PLAN ?= bench/full.toml
report-full: build
	$(INSTALL) --editable .[plot,eval]
	$(BIN)/pylongctx matrix $(PLAN) --data $(DATA) --out $(FULL) --estimate
	$(BIN)/pylongctx matrix $(PLAN) --data $(DATA) --out $(FULL)
	$(BIN)/pylongctx report $(FULL)

include make/test.mk make/release.mk

clean:
	rm -rf build dist
