"""Apply the series to the pinned source of llama.cpp, and test and time it beside that source with test-backend-ops.

    python for-llama.cpp/check.py         flash attention of the CPU backend against its reference
    python for-llama.cpp/check.py --perf  then times, source and series in turns

Builds ggml twice under build/for-llama.cpp. Needs cmake, ninja and a C++ compiler.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "patches"))
from refresh import BY_HAND, apply, extract, pins, tarball  # noqa: E402

BUILD = HERE.parent / "build" / "for-llama.cpp"
WANTED = ("ggml/", "common/", "vendor/", "tests/test-backend-ops.cpp")
OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_OPENMP=OFF",
    "-DGGML_BUILD_TESTS=OFF",
    "-DGGML_BUILD_EXAMPLES=OFF",
]
CASES = "kv=(513|700|1000)"  # of the series; all of upstream's take an hour
SHAPES = "hsk=(64|128).*kv=(7680|8192).*nb=(1|512),"  # of the series, and upstream's own beside them
ROW = re.compile(r"hsk=(\d+).*?nh=(\d+),nr23=\[(\d+),.*?kv=(\d+),nb=(\d+),.*?type_K=(\w+).*?- +([\d.]+) us/run")
Times = dict[tuple[str, ...], list[float]]


def make_tree(name: str, patches: list[Path]) -> Path:
    """Extract the source, patch it and build ggml; return the folder of the libraries."""
    tree, build = BUILD / name, BUILD / f"build-{name}"
    shutil.rmtree(tree, ignore_errors=True)
    extract(tarball(*next(iter(pins("upstream.txt").items()))), tree, WANTED)
    (tree / "ggml/ggml.pc.in").touch()  # the package lacks it
    for patch in patches:
        if apply(tree, patch) == BY_HAND:
            raise SystemExit(f"{patch.name} does not apply")
    subprocess.run(["cmake", "-S", tree / "ggml", "-B", build, "-G", "Ninja", *OPTIONS], check=True)
    subprocess.run(["cmake", "--build", build], check=True)
    return build / "src"


def build_tests(tree: Path, libraries: Path) -> Path:
    """Compile test-backend-ops; the library that it finds at run time decides what it tests."""
    program = BUILD / "test-backend-ops"
    folders = [f"-I{tree / name}" for name in ("ggml/include", "ggml/src", "common", "vendor")]
    names = ["-lggml", "-lggml-cpu", "-lggml-base", "-lpthread"]
    source = tree / "tests/test-backend-ops.cpp"
    compiler = [os.environ.get("CXX", "c++"), "-O1", "-std=c++17", "-w"]
    subprocess.run([*compiler, source, *folders, f"-L{libraries}", *names, "-o", program], check=True)
    return program


def run(program: Path, libraries: Path, mode: str, *more: str) -> str:
    """Run test-backend-ops for flash attention on the CPU; return what it printed."""
    command = [program, mode, "-o", "FLASH_ATTN_EXT", "-b", "CPU", *more]
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-4000:])
    return done.stdout


def print_times(program: Path, source: Path, series: Path, rounds: int) -> None:
    """Print the best time of each shape in both trees."""
    times: dict[Path, Times] = {source: {}, series: {}}
    for _ in range(rounds):
        for libraries, found in times.items():
            for *shape, us in ROW.findall(run(program, libraries, "perf", "-p", SHAPES)):
                found.setdefault(tuple(shape), []).append(float(us))
    print("| head | KV heads | group | rows | tokens | KV | source, ms | series, ms | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for shape, old in times[source].items():
        new = min(times[series][shape])
        print(f"| {' | '.join(shape)} | {min(old) / 1e3:.2f} | {new / 1e3:.2f} | {min(old) / new:.2f} |")


def main() -> None:
    """Check the series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--perf", action="store_true", help="time both")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    patches = sorted(HERE.glob("*.patch"))
    series, source = make_tree("series", patches), make_tree("source", [])
    program = build_tests(BUILD / "series", series)
    print(re.search(r"\d+/\d+ tests passed", run(program, series, "test", "-p", CASES))[0])
    if args.perf:
        print_times(program, source, series, args.rounds)


if __name__ == "__main__":
    main()
