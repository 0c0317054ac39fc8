"""The memory of a CUDA device: native/cuda/arena.cu, with calls of CUDA that stand on memory of the CPU."""

import shutil
import subprocess
from pathlib import Path

from needs import lacks, patched_upstream

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "support" / "cuda_on_cpu"


def test_grains_and_copies(tmp_path):
    compiler = shutil.which("c++")
    if not compiler:
        lacks("build", "no C++ compiler is installed")
    ggml, program = patched_upstream() / "ggml", tmp_path / "arena"
    include = [f"-I{path}" for path in (ROOT, FOLDER, ggml / "include", ggml / "src")]
    source = FOLDER / "arena_driver.cpp"
    subprocess.run([compiler, "-std=c++17", *include, "-o", program, source], check=True, timeout=100)
    done = subprocess.run([program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "")
