"""The CUDA kernels as nvcc compiles them, and what it says of them: for tests and ``cuda_gates.py``."""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "native" / "cuda"
NEEDS_GGML = ("backend.cu",)  # and with it the headers of cuBLAS
SOURCES = sorted(path.name for path in CUDA.glob("*.cu"))
KERNELS = [name for name in SOURCES if "__global__" in (CUDA / name).read_text()]
# as CMakeLists.txt and ggml-cuda's say; ptxas tells what kernels need
FLAGS = (
    "-std=c++17 -O3 -use_fast_math -extended-lambda --expt-relaxed-constexpr -Werror all-warnings -Xptxas -v "
    "-Xcompiler=-Wall,-Wextra,-Wcast-qual,-Wextra-semi,-Wno-missing-field-initializers,-Wno-unused-parameter"
).split()
TOOLKIT = Path("/usr/local/cuda/bin")
CODES = {90: "90a"}  # as native/cuda/toolkit.cmake: code that no other architecture runs
PROPERTIES = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of a kernel on one architecture.

    Attributes
    ----------
    name : str
        Mangled, with its template arguments.
    stack : int
        Bytes of a thread in local memory, what was spilled among them.
    spilled : int
        Bytes that a thread stores and loads because registers were missing.
    shared : int
        Bytes of shared memory that its source declares; what a launch asks for comes in addition.
    """

    name: str
    architecture: int
    stack: int
    spilled: int
    registers: int
    shared: int


def tool(name: str) -> str | None:
    """Return the path of a program of the toolkit: on PATH, installed with CUDA, or by a package of PyPI."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders = [TOOLKIT, *packages.glob("*/bin")]
    return shutil.which(name) or next(filter(None, (shutil.which(folder / name) for folder in folders)), None)


def includes(upstream: Path) -> list[str]:
    """Return what finds ggml's headers, whose warnings are not ours."""
    return [word for part in ("include", "src") for word in ("-isystem", str(upstream / "ggml" / part))]


def compile_object(nvcc: str, upstream: Path, source: Path, folder: Path, architectures: Sequence[int]) -> list[Kernel]:
    """Compile a source for some architectures, keep the intermediate files, and return its kernels."""
    code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    threads = ["--threads", str(len(os.sched_getaffinity(0)))]
    command = [nvcc, "-c", str(source), "-o", str(folder / "out.o"), *FLAGS, *includes(upstream), *code, *threads]
    return kernels_of(compiled([*command, "--keep", f"--keep-dir={folder}"]))


def compile_cubin(nvcc: str, upstream: Path, source: Path, to: Path, architecture: int) -> list[Kernel]:
    """Compile the kernels of a source for one architecture alone, which is what a disassembler reads."""
    code = CODES.get(architecture, architecture)
    command = [nvcc, "-cubin", f"-arch=sm_{code}", str(source), "-o", str(to), *FLAGS, *includes(upstream)]
    return kernels_of(compiled(command))


def compiled(command: Sequence[str]) -> str:
    """Run a compiler and return what it says; AssertionError with that when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def kernels_of(said: str) -> list[Kernel]:
    """Return the kernels that ptxas describes."""
    found = []
    for name, architecture, stack, stores, loads, registers, rest in PROPERTIES.findall(said):
        shared = re.search(r"(\d+) bytes smem", rest)
        sizes = (int(architecture), int(stack), int(stores) + int(loads), int(registers))
        found.append(Kernel(name, *sizes, int(shared.group(1)) if shared else 0))
    return found
