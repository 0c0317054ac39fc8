# make demo | test | lint: everything they need is set up first, in .venv.
# Needs Python >= 3.10, a C++ compiler, make and git; cmake and ninja come from PyPI.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check --quiet
export PATH := $(CURDIR)/$(BIN):$(PATH)
# compiling the peer needs neither its vision tools nor two compilations of the same source
PEER_ARGS := -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF

.PHONY: build demo test lint format clean

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip

$(VENV)/.build-tools: $(BIN)/pip pyproject.toml
	$(PIP) install cmake ninja scikit-build-core cffi
	touch $@

# an editable install: Python files from here, the library rebuilt as far as needed
build: $(VENV)/.build-tools
	$(PIP) install --no-build-isolation --editable .

demo: build
	$(BIN)/pylongctx passkey --method full --method selfextend --lengths 512,1024,2048,4096,8192 --tests 50

$(VENV)/.test-tools: $(VENV)/.build-tools
	# no cache: a wheel of the peer that was built with other options would be taken for this one
	CMAKE_ARGS="$(PEER_ARGS)" $(PIP) install --no-cache-dir --no-build-isolation --no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch $@

test: build $(VENV)/.test-tools
	$(PIP) install --no-build-isolation --editable .[test]
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: build
	$(PIP) install ruff mypy clang-format==18.1.8
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'native/*.h' 'native/*.cpp')

format: build
	$(PIP) install ruff clang-format==18.1.8
	$(BIN)/ruff format . && $(BIN)/clang-format -i $$(git ls-files 'native/*.h' 'native/*.cpp')

clean:
	rm -rf build dist
