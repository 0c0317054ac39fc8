"""native/ compiled by zig's clang for systems that are not Linux: ``python tests/portable.py BUILD [TARGET]...``.

BUILD is the folder of a build with LCTX_HARNESS: its commands name the sources, with their headers, definitions and
warnings. What is for a GPU is left out. zig remembers what it has compiled, so a second run is quick.
"""

import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

NATIVE = Path(__file__).resolve().parents[1] / "native"
# with the vectors of a kind of CPU, so that the kernels for them are read too
TARGETS = {
    "aarch64-macos": ("-mcpu=apple_m1",),
    "x86_64-windows-gnu": ("-mcpu=x86_64_v3",),
}
DEVICE_CODE = ("cuda", "vulkan")
KEPT = ("-D", "-I", "-W", "-std=")


def commands(build: Path) -> dict[Path, list[str]]:
    """Return the sources of native/, each with the part of its command that every system has."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        folders = [["-isystem", folder] for flag, folder in pairwise(words) if flag == "-isystem"]
        found[Path(entry["file"])] = [*(word for word in words if word.startswith(KEPT)), *chain(*folders)]
    sources = [file for file in NATIVE.rglob("*.cpp") if file.relative_to(NATIVE).parts[0] not in DEVICE_CODE]
    if missing := [file for file in sources if file not in found]:
        raise SystemExit(f"{build} does not compile {missing[0]}: build it with LCTX_HARNESS=ON")
    return {file: found[file] for file in sources}


def complaints(target: str, file: Path, words: list[str], folder: Path) -> str:
    """Return what the compiler says; empty: it takes the file."""
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", target, *TARGETS[target], "-O0", "-c"]
    done = subprocess.run(
        [*zig, *words, str(file), "-o", str(folder / f"{target}-{file.stem}.o")], capture_output=True, text=True
    )
    return "" if done.returncode == 0 else done.stderr or f"{file}: exit status {done.returncode}"


def main(build: Path, *targets: str) -> int:
    """Compile all files for the targets, or for all; returns how many failed."""
    targets = targets or tuple(TARGETS)
    jobs = [(target, file, words) for target in targets for file, words in commands(build.resolve()).items()]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        failed = 0
        for said in pool.map(lambda job: complaints(*job, Path(folder)), jobs):
            failed += bool(said)
            if said:
                print(said, flush=True)
    print(f"{len(jobs)} compilations for {', '.join(targets)}: {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]) > 0)
