"""The CUDA backend as a package of its own: what is found, loaded and refused. Modules are made here, without CUDA."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import lacks, patched_upstream

from pylongctx._lib import build_info, ffi, lib

ROOT = Path(__file__).resolve().parents[2]
BUILD = f"{build_info()['version']} {build_info()['series']}"
# a backend that finds no device, as that of CUDA where there is no driver
SOURCE = """
#include "ggml-backend-impl.h"
#include "native/cuda/module.h"
static const char * name(ggml_backend_reg_t) { return "CUDA"; }
static size_t count(ggml_backend_reg_t) { return 0; }
static ggml_backend_dev_t device(ggml_backend_reg_t, size_t) { return nullptr; }
static ggml_backend_reg_t backend() {
    static ggml_backend_reg reg = {GGML_BACKEND_API_VERSION, {name, count, device, nullptr}, nullptr};
    return &reg;
}
static void log_set(ggml_log_callback log, void * data) { log(GGML_LOG_LEVEL_WARN, "the module speaks\\n", data); }
const lctx_cuda_module * lctx_cuda_module_get(void) {
    static const lctx_cuda_module module = {BUILD, "[\\"90\\"]", backend, log_set, nullptr};
    return &module;
}
"""


def package(folder: Path, build: str | None) -> Path:
    """Make a package pylongctx_cuda with a module of a build, or with a file that is not a library."""
    library = folder / "pylongctx_cuda" / "lib" / "libpylongctx-cuda.so"
    library.parent.mkdir(parents=True)
    (folder / "pylongctx_cuda" / "__init__.py").touch()
    if build is None:
        library.write_bytes(b"no library")
        return folder
    compiler = shutil.which("c++")
    if not compiler:
        lacks("build", "no C++ compiler is installed")
    source = folder / "module.cpp"
    source.write_text(SOURCE)
    ggml = patched_upstream() / "ggml"
    include = [f"-I{path}" for path in (ROOT, ggml / "include", ggml / "src")]
    defined = f'-DBUILD="{build}"'
    subprocess.run([compiler, "-shared", "-fPIC", defined, *include, "-o", library, source], check=True, timeout=100)
    return folder


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds the package of a folder."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)


def test_a_module_of_this_build_is_loaded(tmp_path):
    code = "import json, pylongctx._arguments as a; print(json.dumps([a.build_info(), a.why_no_gpu()]))"
    done = run(package(tmp_path, BUILD), code)
    assert done.returncode == 0, done.stderr
    info, why = json.loads(done.stdout)
    assert info["cuda"] == ["90"] and info["backends"] == build_info()["backends"]
    assert "CUDA finds no GPU" in why
    assert "the module speaks" in done.stderr


def test_a_module_of_another_build_is_refused(tmp_path):
    done = run(package(tmp_path, "0.0.1 elsewhere"), "import pylongctx._lib")
    assert done.returncode == 1
    assert f"it belongs to pylongctx 0.0.1 elsewhere, this is {BUILD}" in done.stderr
    assert "install the pylongctx-cuda of this version, or uninstall it" in done.stderr


def test_a_second_module_is_refused(tmp_path):
    code = """
from pylongctx._lib import cuda_library, ffi, lib
reason = ffi.new("char[]", 100)
print(lib.lctx_cuda_load(str(cuda_library()).encode(), reason, 100) == lib.LCTX_INVALID, ffi.string(reason).decode())
"""
    done = run(package(tmp_path, BUILD), code)
    assert done.stdout == "True there is a CUDA backend already\n", done.stderr


def test_a_file_that_is_not_a_library_is_refused(tmp_path):
    done = run(package(tmp_path, None), "import pylongctx._lib")
    assert done.returncode == 1
    assert "ImportError: the CUDA backend" in done.stderr and "cannot be loaded" in done.stderr


@pytest.mark.parametrize("path", [ffi.NULL, b"", b"/nowhere/libpylongctx-cuda.so"])
def test_reasons_fit_where_they_go(path):
    if build_info()["cuda"] is not None:
        pytest.skip("the library has a CUDA backend")
    reason = ffi.new("char[]", b"x" * 9)
    assert lib.lctx_cuda_load(path, reason, 8) == lib.LCTX_INVALID
    assert 0 < len(ffi.string(reason)) < 8
    assert lib.lctx_cuda_load(path, ffi.NULL, 0) == lib.LCTX_INVALID
