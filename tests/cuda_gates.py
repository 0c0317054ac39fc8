"""What the CUDA kernels ask of a GPU, read from their machine code and held against limits; no GPU is needed.

    python tests/cuda_gates.py                         # all sources for sm_86, sm_89, sm_90 and sm_120
    python tests/cuda_gates.py --arch 86 attend.cu     # one of them

It prints a table per architecture: registers, spills, shared memory, and the instructions of hot loops. Exit status 0:
every limit is held; 1: one is not, or a kernel that has one is not there; 2: something is missing. An aim that is
missed is listed and fails nothing. Needs nvcc, and nvdisasm (pip install nvidia-cuda-nvdisasm).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "support"))

import cuda_build
import cuda_sass
from cuda_build import CUDA, KERNELS, NEEDS_GGML
from needs import newest_patched

ARCHITECTURES = (86, 89, 90, 120)
TILE = 16 * 64 * 128  # multiplications of 16 columns with 64 rows of 128 channels


@dataclass(frozen=True)
class Limit:
    """The most of something that a kernel may take; a number that a change improves is lowered here.

    Attributes
    ----------
    kernel : str
        Pattern of its name, as the table shows it.
    what : str
        A column of the table.
    most : float
        More of it fails: what the kernel takes today, on the architecture where that is most.
    aim : float or None
        What it should take; None: it does.
    """

    kernel: str
    what: str
    most: float
    aim: float | None = None


# Spills are 0 wherever no line here says otherwise. The loop of score_keys with products does not have what it makes of
# their sums yet; 95 instructions for 16 columns and rows are 380 for 64 rows. In the dense loop, sm_120 takes 10 more
# than sm_86, to load constants; the tensor cores are busy for longer than either.
DENSE = "attend_[lr]*<shape<128, true, 1, false>>"  # of prompts: lists and runs
DENSE_IN_GROUP = "attend_[lr]*<shape<128, true, 2, true>>"  # by wgmma: code for sm_90a alone
DENSE_OF_TWO = "attend_[lr]*<shape<128, true, 2, false>>"  # stages, which run on sm_80 and sm_90 alone: 435, else 612
QUANTIZED = "attend_[lr]*<shape<128, false, *"  # the longest loop is iq4_nl's, whose table takes 7 for four values
LIMITS = (
    Limit("attend<*", "registers", 255),
    Limit("attend_[lr]*", "registers", 255),
    Limit("attend_lists<shape<256, true, *", "spilled", 48, aim=0),
    Limit("attend_lists<shape<128, true, 2, false>>", "spilled", 16),  # on sm_86, where it does not run; 0 on sm_90
    Limit("attend_lists<shape<512, false, *", "spilled", 32, aim=0),
    Limit("attend_runs<shape<256, true, *", "spilled", 16, aim=0),
    Limit("attend_runs<shape<256, false, *", "spilled", 204, aim=0),  # rows that are not converted
    Limit("attend_runs<shape<5*, false, *", "spilled", 32, aim=0),
    Limit("decode<shape<*, 1, 1, *", "registers", 128),  # of a head alone: four blocks of a multiprocessor
    Limit("decode<shape<*, [23], 1, *", "registers", 168),  # of a wide one: three
    Limit("decode<shape<*, 1, 4, *", "registers", 168),  # of four heads
    Limit("move_rows", "spilled", 24, aim=0),
    Limit("score_keys<*", "registers", 128),
    Limit("prepare_tiles<tile_shape<*", "spilled", 88, aim=0),
    Limit("attend<attend_shape<128, false>, true>", "dense", 765),
    Limit(DENSE, "dense", 600, aim=580),
    Limit(DENSE_OF_TWO, "dense", 615),
    Limit(DENSE_IN_GROUP, "dense", 345),
    Limit(QUANTIZED, "unpack", 48, aim=25),
    Limit("score_tiles<*", "scores", 228),
    Limit("score_keys<*, 4, 1>", "scores", 270, aim=240),
    Limit("score_keys<*, 1, 4>", "scores", 605, aim=380),
    Limit("vote<*", "registers", 220),
    Limit("vote<shape<128>>", "scores", 280),
    Limit("vote<*", "unpack", 21.5),
)


@dataclass(frozen=True)
class Row:
    """A kernel on an architecture: a line of the table.

    Attributes
    ----------
    spilled : int
        Bytes that a thread stores and loads because registers were missing.
    shared : int
        Bytes of shared memory that the source declares, without what a launch asks for.
    dense, scores, unpack : float or None
        Instructions that a warp executes in the loop with the most matrix products, per tile of 16 columns, 64 rows and
        128 channels: of keys and values together, and of keys alone; per 8 values in the longest loop that unpacks
        quantized rows. None: there is no such loop.
    """

    kernel: str
    architecture: int
    registers: int
    stack: int
    spilled: int
    shared: int
    dense: float | None = None
    scores: float | None = None
    unpack: float | None = None


COLUMNS = ("registers", "stack", "spilled", "shared", "dense", "scores", "unpack")


# ---- what a kernel takes ----


def rows_of(source: str, architecture: int, nvcc: str, nvdisasm: str, upstream: Path) -> list[Row]:
    """Compile a source for an architecture and return its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "out.cubin"
        kernels = cuda_build.compile_cubin(nvcc, upstream, CUDA / source, cubin, architecture)
        codes = {code.name: code for code in cuda_sass.codes(nvdisasm, cubin)}
    names = cuda_sass.readable([kernel.name for kernel in kernels])
    return [
        Row(name, architecture, one.registers, one.stack, one.spilled, one.shared, **loops(codes[one.name]))
        for name, one in zip(names, kernels, strict=True)
    ]


def loops(code: cuda_sass.Code) -> dict[str, float | None]:
    """Return the instructions of the hot loops of a kernel, the largest where there are several.

    Values are loaded transposed and keys are not: a loop that does both is a dense one.
    """
    found: dict[str, float | None] = {"dense": None, "scores": None, "unpack": None}
    hot = [(loop, *loop.executed(cuda_sass.products)) for loop in code.loops_with(cuda_sass.products)]
    most = max((volume for _, volume, _ in hot), default=0)
    for loop, volume, n in hot:
        if volume >= most / 2:  # others are the ends of a tile
            name, volumes = ("dense", 2) if loop.total(cuda_sass.transposed_loads) else ("scores", 1)
            found[name] = max(found[name] or 0.0, n / volume * volumes * TILE)
    no_rows = (cuda_sass.products, cuda_sass.packed_floats)
    unpacking = [loop for loop in code.loops_with(cuda_sass.octets) if not any(map(loop.total, no_rows))]
    costs = [n / values for values, n in (loop.executed(cuda_sass.octets) for loop in unpacking)]
    return found | {"unpack": max(costs, default=None)}


# ---- limits ----


def matches(row: Row, limit: Limit) -> bool:
    return fnmatchcase(row.kernel, limit.kernel)


def verdicts(rows: Sequence[Row], limits: Sequence[Limit] = LIMITS) -> Iterator[tuple[str, str]]:
    """Yield ``failed`` or ``aim missed`` and why, for everything that is not as it should be."""
    for row in rows:
        if row.spilled and not any(matches(row, one) for one in limits if one.what == "spilled"):
            yield "failed", f"sm_{row.architecture} {row.kernel}: {row.spilled} bytes are spilled, and none may be"
    for limit in limits:
        of = [row for row in rows if matches(row, limit)]
        taken = [(value, row) for row in of if (value := getattr(row, limit.what)) is not None]
        if not taken:
            yield "failed", f"{limit.kernel}: nothing has {limit.what}, so the limit of {limit.most:g} holds nothing"
            continue
        value, row = max(taken, key=lambda pair: pair[0])
        at = f"sm_{row.architecture} {row.kernel}: {limit.what} {value:.4g}"
        if value > limit.most:
            yield "failed", f"{at}, more than {limit.most:g}"
        elif limit.aim is not None and value > limit.aim:
            yield "aim missed", f"{at}, aim {limit.aim:g}"


# ---- command ----


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines of markdown, one table per architecture."""
    for architecture in sorted({row.architecture for row in rows}):
        yield f"\n| sm_{architecture} | {' | '.join(COLUMNS)} |"
        yield f"|---|{'---:|' * len(COLUMNS)}"
        for row in (row for row in rows if row.architecture == architecture):
            yield f"| `{row.kernel}` | {' | '.join(cell(getattr(row, column)) for column in COLUMNS)} |"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sources = [name for name in KERNELS if name not in NEEDS_GGML]
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=f"of {', '.join(sources)} (default: all)")
    parser.add_argument("--arch", type=int, action="append", help="may be repeated (default: 86, 89, 90, 120)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args(words)
    if unknown := sorted(set(args.sources) - set(sources)):
        parser.error(f"no kernels in {', '.join(unknown)}; there are {', '.join(sources)}")
    args.is_whole, args.sources = not args.sources and not args.arch, args.sources or sources
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    nvcc, nvdisasm, upstream = cuda_build.tool("nvcc"), cuda_build.tool("nvdisasm"), newest_patched()
    if not nvcc or not nvdisasm or not upstream:
        missing = {"nvcc": nvcc, "nvdisasm (pip install nvidia-cuda-nvdisasm)": nvdisasm, "a build": upstream}
        print(f"missing: {', '.join(name for name, found in missing.items() if not found)}", file=sys.stderr)
        return 2
    rows = []
    for architecture in args.arch or ARCHITECTURES:
        for source in args.sources:
            print(f"sm_{architecture} {source}", file=sys.stderr)
            rows += rows_of(source, architecture, nvcc, nvdisasm, upstream)
    print("\n".join(table(rows)))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    here = [one for one in LIMITS if args.is_whole or any(matches(row, one) for row in rows)]
    found = list(verdicts(rows, here))
    print("".join(f"\n{verdict}: {why}" for verdict, why in sorted(found)))
    return int(any(verdict == "failed" for verdict, _ in found))


if __name__ == "__main__":
    sys.exit(main())
