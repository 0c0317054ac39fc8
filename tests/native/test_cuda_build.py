"""The CUDA kernels as a GPU gets them: no warnings, no more registers than there are, products on tensor cores."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import thinning
from cuda_build import CUDA, FLAGS, KERNELS, NEEDS_GGML, ROOT, SOURCES, Kernel, compile_object, includes, tool
from needs import lacks, patched_upstream

ARCHITECTURES = (75, 86, 89, 90, 120) if thinning.run_all else (86,)
PRODUCTS = ("attend.cu", "lists.cu", "runs.cu", "select.cu", "vote.cu")  # those that multiply on tensor cores
PRODUCTS_OF_BYTES = ("select.cu",)
MAX_LOCAL = 128  # bytes of a thread in local memory, which is as slow as global memory


@pytest.fixture(scope="session")
def nvcc() -> str:
    found = tool("nvcc")
    if not found:
        lacks("cuda", "nvcc is not installed")
    return found


@pytest.fixture(scope="session")
def upstream() -> Path:
    return patched_upstream()


@pytest.fixture(scope="session")
def compiled(nvcc, upstream, tmp_path_factory):
    """Return a function from a source to its folder and its kernels, compiled on first use."""
    done = {}

    def get(name: str) -> tuple[Path, list[Kernel]]:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            done[name] = folder, compile_object(nvcc, upstream, CUDA / name, folder, ARCHITECTURES)
        return done[name]

    return get


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in NEEDS_GGML])
def test_sources_compile_without_a_warning(compiled, name):
    folder, kernels = compiled(name)
    assert (folder / "out.o").stat().st_size > 0
    assert {kernel.architecture for kernel in kernels} == (set(ARCHITECTURES) if name in KERNELS else set())


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_keep_to_their_registers(compiled, name):
    _, kernels = compiled(name)
    over = [kernel for kernel in kernels if kernel.stack > MAX_LOCAL]
    assert over == []


@pytest.mark.parametrize("name", [name for name in KERNELS if name in PRODUCTS])
def test_products_run_on_tensor_cores(compiled, name):
    folder, _ = compiled(name)
    for architecture in ARCHITECTURES:
        named = f"*compute_{architecture}*.ptx" if len(ARCHITECTURES) > 1 else "*.ptx"
        ptx = next(folder.glob(named)).read_text()
        assert re.search(r"mma\.sync\.aligned\.m16n8k(8|16)\.\S*f32\.f16\.f16\.f32", ptx), architecture
        if name in PRODUCTS_OF_BYTES:
            assert re.search(r"mma\.sync\.aligned\.m(16n8k32|8n8k16)\.\S*s32\.s8\.s8\.s32", ptx), architecture


def test_the_assembler_keeps_the_tensor_cores(compiled):
    """What runs in the end; the disassembler is a package of its own."""
    if not (cuobjdump := tool("cuobjdump")):
        lacks("cuda", "cuobjdump is not installed (nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm)")
    folder, _ = compiled("attend.cu")
    done = subprocess.run([cuobjdump, "-sass", str(folder / "out.o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"arch = sm_(\d+)", done.stdout)
    by_architecture = {int(a): code for a, code in zip(parts[1::2], parts[2::2], strict=True)}
    assert set(ARCHITECTURES) <= set(by_architecture)
    assert all("HMMA" in by_architecture[a] for a in ARCHITECTURES)


# ---- inside ggml's backend ----


@pytest.fixture(scope="session")
def cublas() -> Path:
    """Return the folder of cuBLAS's headers: the toolkit's, or those that the package nvidia-cublas brings."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders = [Path("/usr/local/cuda/include"), packages / "cu13" / "include", packages / "cublas" / "include",
               ROOT / "build" / "cublas" / "nvidia" / "cu13" / "include"]  # fmt: skip
    found = [folder for folder in folders if (folder / "cublas_v2.h").is_file()]
    if not found:
        lacks("cuda", "no headers of cuBLAS: make build/cublas fetches them")
    return found[0]


@pytest.mark.parametrize(("source", "flags"), [
    ("native/cuda/backend.cu", FLAGS),
    ("ggml/src/ggml-cuda/ggml-cuda.cu", ["-std=c++17", "-use_fast_math", "-extended-lambda"]),
])  # fmt: skip
def test_the_backend_compiles_with_our_op(nvcc, upstream, cublas, tmp_path, source, flags):
    """For one architecture; the kernels in it are ggml's."""
    path = ROOT / source if source.startswith("native") else upstream / source
    command = [nvcc, "-c", str(path), "-o", str(tmp_path / "out.o"), *flags, "-arch=sm_75", f"-I{ROOT}"]
    done = subprocess.run([*command, *includes(upstream), "-isystem", str(cublas)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
