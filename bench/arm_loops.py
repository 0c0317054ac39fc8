"""Count the inner loops of the kernels for 64-bit ARM: instructions, and cycles as llvm-mca models CPUs.

    make wheel ARCH=aarch64
    python bench/arm_loops.py

No time is measured: without such a machine, the instructions that the compiler chose are compared with those that the
work needs at least. ``llvm-mca`` comes with LLVM 19 or later (Debian: ``llvm-19``), zig with ``make wheel``.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/linux-aarch64"
FLAGS = {"armv8.2": "-mcpu=generic+v8_2a+dotprod+fullfp16"}
FLAGS["armv8.6"] = FLAGS["armv8.2"] + "+i8mm+bf16"
PIPES = {"neoverse-n1": 2, "neoverse-n2": 2, "neoverse-v1": 4, "neoverse-v2": 4}  # for vectors
# Cortex-A76 is N1's core, which has no i8mm
CPUS = {
    "armv8.2": ("neoverse-n1", "neoverse-v1", "neoverse-v2"),
    "armv8.6": ("neoverse-n2", "neoverse-v1", "neoverse-v2"),
}
ITERATIONS = 200
ATTEND, SELECT, UPSTREAM = "native/cpu/attend.cpp", "native/cpu/select.cpp", "arch/arm/quants.c"


@dataclass(frozen=True)
class Loop:
    """A loop, by the function that has it, what one round of it does, and the vector instructions that this needs."""

    file: str
    function: str
    work: str
    needed: int
    pairs: int  # of a key and a query, or a value and a weight, times channels


OF_8_2 = (
    Loop(SELECT, r"index_tileILi4ELi2E", "index, 4 keys x 8 columns x 4 channels", 8, 128),
    # products, levels by table, their codes: three shifts, and three masks, as the last shift leaves two bits
    Loop(SELECT, r"index_scores_nILi2ELi1E", "index, 16 keys x 1 column x 16 channels", 16 + 16 + 12 + 12, 256),
    Loop(SELECT, r"index_scores_nILi2ELi2E", "index, 16 keys x 2 columns x 16 channels", 32 + 16 + 12 + 12, 512),
    # products, and for each sum a conversion and the products with both scales
    Loop(ATTEND, r"key_tileILi4ELi2E", "q8_0 keys, 4 x 8 columns x 32 channels", 64 + 8 * 3, 1024),
    Loop(ATTEND, r"few_integer_scores_nI10block_q8_0Li1E", "q8_0 keys, 4 x 1 column x 32 channels", 8 + 8 + 2, 128),
    Loop(ATTEND, r"few_integer_scores_nI10block_q8_0Li2E", "q8_0 keys, 4 x 2 columns x 32 channels", 16 + 16 + 3, 256),
    # two more instructions for each half of a block
    Loop(ATTEND, r"few_integer_scores_nI10block_q4_0Li1E", "q4_0 keys, 4 x 1 column x 32 channels", 34, 128),
    Loop(ATTEND, r"few_integer_scores_nI10block_q4_0Li2E", "q4_0 keys, 4 x 2 columns x 32 channels", 51, 256),
    # widened in three steps, the scale, the products
    Loop(ATTEND, r"few_weigh_nI14lctx_rows_q8_0Li1ELi8E.*order", "q8_0 values, 32 x 1 column", 12 + 8 + 9 + 8, 32),
    Loop(ATTEND, r"few_weigh_nI14lctx_rows_q8_0Li4ELi4E.*order", "q8_0 values, 16 x 4 columns", 6 + 4 + 5 + 16, 64),
    Loop(ATTEND, r"few_weigh_nI13lctx_rows_f16Li1ELi8E.*order", "f16 values, 32 x 1 column", 8 + 8, 32),
    Loop(UPSTREAM, r"^ggml_vec_dot_q8_0_q8_0$", "llama.cpp, q8_0 keys, 1 x 1 column x 64 channels", 4 + 4, 64),
    Loop(UPSTREAM, r"^ggml_vec_dot_q4_0_q8_0$", "llama.cpp, q4_0 keys, 1 x 1 column x 64 channels", 4 + 8 + 4, 64),
)
OF_8_6 = (
    Loop(SELECT, r"index_tileILi8ELi2E", "index, 8 keys x 8 columns x 8 channels", 16, 512),
    Loop(ATTEND, r"key_tileILi4ELi2E", "q8_0 keys, 4 x 8 columns x 32 channels", 32 + 8 * 3, 1024),
    # keys laid in pairs, products, for two keys and two columns a conversion and the products with both scales, and the
    # scales of four keys
    Loop(ATTEND, r"few_pair_scores_nI10block_q8_0Li2E", "q8_0 keys, 4 x 2 columns x 32 channels", 8 + 8 + 6 + 3, 256),
    Loop(ATTEND, r"few_pair_scores_nI10block_q8_0Li4E", "q8_0 keys, 4 x 4 columns x 32 channels", 8 + 16 + 12 + 3, 512),
    Loop(ATTEND, r"few_pair_scores_nI10block_q4_0Li4E", "q4_0 keys, 4 x 4 columns x 32 channels", 52 + 3, 512),
)
LOOPS = {"armv8.2": OF_8_2, "armv8.6": OF_8_6}


def assembly(file: str, kind: str, build: Path, zig: str) -> list[str]:
    """Return the instructions and labels of a source file, compiled as the build does and for a kind."""
    commands = json.loads((build / "compile_commands.json").read_text())
    entry = next(one for one in commands if one["file"].endswith(file))
    words = shlex.split(entry["command"])
    kept = [word for word in words if re.match(r"-(I|D|O|std)", word)]
    compiler = "cc" if file.endswith(".c") else "c++"
    with TemporaryDirectory() as folder:
        to = Path(folder) / "code.s"
        target = ["-target", "aarch64-linux-gnu.2.28", FLAGS[kind], "-g0", "-S", "-o", str(to)]
        subprocess.run([zig, compiler, *kept, *target, entry["file"]], cwd=entry["directory"], check=True)
        return to.read_text("latin-1").splitlines()


def loops(lines: list[str], function: str) -> Iterator[list[str]]:
    """Yield the loops of a function: from a label to a branch back to it."""
    code: list[str] = []
    labels: dict[str, int] = {}
    inside = False
    for line in lines:
        name = re.match(r"([A-Za-z_]\w*):", line)
        if name:
            inside, code, labels = bool(re.search(function, name[1])), [], {}
        elif inside and (label := re.match(r"(\.L\w+):", line)):
            labels[label[1]] = len(code)
        elif inside and (text := line.partition("//")[0].strip()) and not text.startswith("."):
            code.append(text)
            branch = re.fullmatch(r"(?:b|b\.\w+|cbn?z|tbn?z)\s(?:.*,\s*)?(\.L\w+)", text)
            if branch and branch[1] in labels:
                yield code[labels[branch[1]] :]


def cycles(code: list[str], cpu: str) -> float:
    """Return the cycles of a round of a loop as llvm-mca models a CPU."""
    newest = (shutil.which(f"llvm-mca{version}") for version in ("-21", "-20", "-19", ""))
    program = next(filter(None, newest), "llvm-mca")
    features = "-mattr=+dotprod,+fullfp16,+i8mm"
    words = [program, "-mtriple=aarch64", f"-mcpu={cpu}", features, f"-iterations={ITERATIONS}"]
    done = subprocess.run(words, input="\n".join(code), capture_output=True, text=True, check=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert total is not None
    return int(total[1]) / ITERATIONS


def print_table(kind: str, texts: dict[str, list[str]]) -> None:
    """Print a row for each loop of a kind."""
    cpus = CPUS[kind]
    print(f"| {kind} | instructions | needed on vectors |" + "".join(f" {cpu} |" for cpu in cpus) + " pairs a cycle |")
    print("|---" * (4 + len(cpus)) + "|")
    for loop in LOOPS[kind]:
        found = [code for code in loops(texts[loop.file], loop.function) if len(code) >= 8]
        products = [code for code in found if any(re.match("sdot|smmla|fmla", text) for text in code)]
        code = min(products, key=len)
        times = {cpu: cycles(code, cpu) for cpu in cpus}
        cells = [f"{time:.1f} ({time * PIPES[cpu] / loop.needed:.2f})" for cpu, time in times.items()]
        rate = loop.pairs / times[cpus[0]]
        print(f"| {loop.work} | {len(code)} | {loop.needed} | {' | '.join(cells)} | {rate:.1f} |")
    print()


def main() -> None:
    """Print a table for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build", type=Path, default=BUILD, help="folder of a build with compile_commands.json")
    build = parser.parse_args().build
    zig = subprocess.run(
        [sys.executable, "-c", "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / 'zig')"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    for kind in FLAGS:
        files = dict.fromkeys(loop.file for loop in LOOPS[kind])
        print_table(kind, {file: assembly(file, kind, build, zig) for file in files})


if __name__ == "__main__":
    main()
