"""Whether the tests notice a broken line: breaks lines one at a time and prints who noticed.

    .venv/bin/python tests/mutations.py [--suite default|full|both] [--only WORD] [--expected-only]

Needs the library of ``make test`` (a build folder with LCTX_HARNESS=ON), which it builds again for every broken line.
The files that should notice are run first, all others only when they do not. Sources and library are put back.
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
LIMIT = 3600  # seconds; a suite that takes longer hangs, which is noticed too


@dataclass(frozen=True)
class Mutation:
    """A line of a file that is wrong; ``tests`` are the files that should notice."""

    name: str
    path: str
    old: str
    new: str
    tests: str

    def line(self) -> int:
        """Return the number of the line.

        Raises
        ------
        SystemExit
            The text is not there exactly once.
        """
        text = (ROOT / self.path).read_text()
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.path} has {text.count(self.old)} times: {self.old}")
        return text[: text.index(self.old)].count("\n") + 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Break the line while the block runs."""
        self.line()
        path = ROOT / self.path
        text = path.read_text()
        try:
            path.write_text(text.replace(self.old, self.new))
            yield
        finally:
            path.write_text(text)


MUTATIONS = [
    Mutation("parts of a softmax merge", "native/cpu/softmax.h",
             "l = l * f + l1 * f1;", "l = l + l1 * f1;", "test_ops.py"),
    Mutation("angle of near keys", "native/cpu/store.cpp",
             "(size_t)at.near_angle *", "(size_t)at.angle *", "test_ops.py"),
    Mutation("blocks of transformed queries", "native/cpu/walk.h",
             "a.head_dim_k, a.params.hadamard.k);", "a.head_dim_k, a.params.hadamard.v);", "test_ops.py"),
    Mutation("chunks in which an angle ends", "native/methods/filter.cpp",
             "(then[s].row0 + size - 1) / size * size", "then[s].row0 / size * size",
             "test_chunks.py test_oracle_chunks.py"),
    Mutation("levels of keys in two bits", "native/cpu/index.h",
             "MIDDLE = 6.5f;", "MIDDLE = 5.5f;", "test_chunks.py test_oracle_chunks.py"),
    Mutation("rows of a chunk that are held", "native/cpu/key-scores.h",
             "cells.cell((chunk + 1) * size)", "cells.cell(chunk * size) + size", "test_evict.py"),
    Mutation("rows that a vote counts", "native/cpu/vote.cpp",
             "lctx_rows_read(segs, a.n_seg),", "lctx_rows_read(segs, 1),",
             "test_evict.py"),
    Mutation("a segment at the end of a page (CUDA)", "native/cuda/vote.cu",
             "segs[first].row0 <= hi; first++", "segs[first].row0 < hi; first++", "test_cuda_evict.py"),
    Mutation("the last rows that a warp reads (CUDA)", "native/cuda/attend.cu",
             "lctx_min(hi, first + 16 * n + 16)", "lctx_min(hi - 1, first + 16 * n + 16)", "test_cuda_attend.py"),
    Mutation("weights of values that were divided (CUDA)", "native/cuda/dense.h",
             "weight *= factor", "weight *= 1.0f", "test_cuda_attend.py"),
    Mutation("tiles that do not read the text that was converted (CUDA)", "native/cuda/runs.cu",
             "columns.next_sequence(seq) == INT_MAX;", "seq >= 0;", "test_cuda_attend.py"),
    Mutation("units of a row of a panel (CUDA)", "native/cuda/warpgroup.h",
             "row % 8 * UNIT", "row % 4 * UNIT", "test_cuda_warpgroup.py"),
    Mutation("a tile that is copied while it is multiplied (CUDA)", "native/cuda/warpgroup.h",
             "r.fetch_k(later, i + 2);", "r.fetch_k(later, i + 3);", "test_cuda_warpgroup.py"),
    Mutation("copies that a product may not see (CUDA)", "native/cuda/warpgroup.h",
             "lctx_group_sees_copies();", "", "test_cuda_warpgroup.py"),
    Mutation("sums of values that are not finite (CUDA)", "native/cuda/flash.h",
             "(sums & 0x7fff7fff) != 0", "false", "test_cuda_attend.py"),
    Mutation("rows of a piece that are in the next page (CUDA)", "native/cuda/decode.cu",
             "p.first_page : p.last_page", "p.first_page : p.first_page", "test_cuda_decode.py"),
    Mutation("a word between two words (CUDA)", "native/cuda/rows.h",
             "half ? 0x5432 : 0x3210", "half ? 0x3210 : 0x3210", "test_cuda_attend.py"),
    Mutation("the warps that share a wide head (CUDA)", "native/cuda/flash.h",
             "lctx_unrolled<N>([&](int warp)", "lctx_unrolled<N - 1>([&](int warp)", "test_cuda_attend.py"),
    Mutation("values that are channels of keys (CUDA)", "native/cuda/blocks.h",
             "a.cache.v_pool.data - a.cache.k_pool.data", "a.cache.k_pool.row_size", "test_cuda_latent.py"),
    Mutation("constant distance of dual chunks", "native/methods/dca.cpp",
             "t < window ? size + t", "t <= window ? size + t", "test_methods.py"),
    Mutation("half of the ring of queries", "native/memory/open.cpp",
             "s.open[1 - s.kept_half] = last[seq];", "s.open[s.kept_half] = last[seq];", "test_memory.py"),
    Mutation("owners of a page", "native/memory/page-numbers.cpp",
             "--pages[page].n_owner == 0", "--pages[page].n_owner <= 1", "test_memory.py"),
    Mutation("pages after the end", "native/memory/blocks.cpp",
             "head, n_block(n), n_block(store", "head, n_block(n) + 1, n_block(store", "test_order.py"),
    Mutation("pages that are not shared any more", "native/memory/blocks.cpp",
             "seqs_[seq].shares = !why.empty();", "seqs_[seq].shares = true;", "test_overhead.py"),
    Mutation("the end of a step", "native/memory/votes.cpp",
             "retain_->border(p) - p + 1 : INT32_MAX;", "retain_->border(p) - p + 2 : INT32_MAX;",
             "test_corm_sequences.py"),
    Mutation("the state used least recently", "pylongctx/engine/saved_state.py",
             "self.cache_state.move_to_end(found)", "pass", "test_state.py"),
    Mutation("a harmonic mean", "pylongctx/eval/scorers.py",
             "return 2 * n_same / (len", "return n_same / (len", "test_eval_scorers.py"),
    Mutation("where special tokens are text", "pylongctx/chat/conversation.py",
             "if not _overlaps(span, plain, starts)]", "if _overlaps(span, plain, starts)]", "test_chat_tokens.py"),
    Mutation("a tool that must be called", "pylongctx/chat/conversation.py",
             'return named, "required"', 'return named, "auto"', "test_chat_tools.py"),
]  # fmt: skip


class Library:
    """The native library that the tests load, and the build folder that it comes from."""

    def __init__(self, folder: Path) -> None:
        code = "from pylongctx._lib import library_path; print(library_path())"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        self.folder, self.path = folder, Path(done.stdout.strip())

    def build(self) -> None:
        """Bring the library up to date with the sources."""
        command = ["cmake", "--build", str(self.folder), "--target", "pylongctx"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(done.stdout[-3000:])
        new = self.path.with_name("new.so")  # renamed: a process that has the old one open keeps it
        shutil.copy(self.folder / "libllama.so", new)
        new.replace(self.path)


def first_failure(suite: str, files: Sequence[str], jobs: int) -> str | None:
    """Return the first test of some files that fails, None when all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider",
               "-n", str(jobs), "--dist", "loadfile"]  # fmt: skip
    command += ["--all"] * (suite == "full") + [str(path) for name in files for path in TESTS.rglob(name)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "it hangs"
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(?:\w+/)?(.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if found or done.returncode == 0:
        return found and found[1]
    raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def caught_by(suite: str, mutation: Mutation, jobs: int, expected_only: bool) -> str:
    """Return the test that notices, and how long it took to."""
    start = time.monotonic()
    expected = mutation.tests.split()
    failed = first_failure(suite, expected, jobs)
    if not failed and not expected_only:
        others = [path.name for path in TESTS.rglob("test_*.py") if path.name not in expected]
        failed = first_failure(suite, sorted(others), jobs)
    return f"{failed or '**none**'}, {time.monotonic() - start:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["default", "full", "both"], default="both")
    parser.add_argument("--only", default="", help="mutations whose name or file contains this")
    parser.add_argument("--expected-only", action="store_true", help="do not ask the files that need not notice")
    parser.add_argument("--build", type=Path, help="build folder (default: that of make test)")
    parser.add_argument("-n", "--jobs", type=int, default=2, help="processes that run tests")
    args = parser.parse_args()
    suites = ["default", "full"] if args.suite == "both" else [args.suite]
    chosen = [m for m in MUTATIONS if args.only in m.name + m.path]
    for mutation in chosen:
        mutation.line()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is broken is put back
    library = Library(args.build or next((ROOT / "build").glob("py3-none-*")))
    try:
        library.build()
        files = sorted({name for mutation in chosen for name in mutation.tests.split()})
        if failed := first_failure("default", files, args.jobs):
            raise SystemExit(f"{failed} fails with nothing broken")
        print(f"| broken | line | {' | '.join(f'{suite} suite' for suite in suites)} |")
        print(f"|---|---|{'---|' * len(suites)}", flush=True)
        for mutation in chosen:
            with mutation.applied():
                library.build()
                found = [caught_by(suite, mutation, args.jobs, args.expected_only) for suite in suites]
            print(f"| {mutation.name} | {mutation.path}:{mutation.line()} | {' | '.join(found)} |", flush=True)
    finally:
        library.build()


if __name__ == "__main__":
    main()
