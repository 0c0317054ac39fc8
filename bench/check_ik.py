"""Say which commit of ik_llama.cpp was built, and fail when it lacks the kernels that this CPU can run.

    python bench/check_ik.py SOURCE LLAMA_BENCH MODEL

``make tools-ik`` runs it: a comparison with a build that fell back to AVX2 would flatter us.
"""

import subprocess
import sys
from pathlib import Path

BANNER = "HAVE_FANCY_SIMD is "
# what its fast kernels are compiled for (iqk_config.h), by the names of the system
NEEDED = {"avx512f", "avx512_vnni", "avx512vl", "avx512bw", "avx512dq"}


def commit(source: str) -> str:
    """Return the commit of a checkout, with a mark when files differ from it."""
    words = ["git", "-C", source, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"unknown ({done.stderr.strip()})"


def banner(program: str, model: str) -> str:
    """Return whether the program has its fast kernels, in the words that it prints when it loads a model."""
    words = [program, "-m", model, "-p", "8", "-n", "0", "-r", "1", "-t", "1", "-v"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    found = next((line for line in lines if BANNER in line), "")
    if done.returncode or not found:
        sys.exit(f"{program} ended with status {done.returncode} and said nothing of HAVE_FANCY_SIMD: {lines[-1:]}")
    return found.strip("= \n")


def cpu_flags() -> set[str]:
    """Return what the CPU can do, as the system says."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def main(source: str, program: str, model: str) -> None:
    """Print the commit and the banner; exits with a message when fast kernels are missing."""
    said = banner(program, model)
    print(f"ik_llama.cpp {commit(source)}: {said}")
    if cpu_flags() >= NEEDED and "NOT" in said:
        sys.exit("this CPU has AVX-512 VNNI, but the build does not use it: a compiler that knows this CPU is needed")


if __name__ == "__main__":
    main(*sys.argv[1:])
