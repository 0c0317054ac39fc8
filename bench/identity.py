"""How long it takes to know which model the files hold, see docs/store.md.

    python bench/identity.py qwen2.5-1.5b.gguf

Cold is with the file dropped from the page cache. Reading the header is done for the checks of a file anyway.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator

from report import machine, spread, table

from pylongctx.model_files.digests import ModelFiles, digest_of
from pylongctx.model_files.gguf import check_gguf, layout_of


def drop(paths: list[str]) -> None:
    """Drop files from the page cache, except for what is mapped."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(run: Callable[[], object], before: Callable[[], object], n: int) -> str:
    """Return the times of some runs."""
    found = []
    for _ in range(n):
        before()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return spread(found, 3)


def rows(path: str, n: int) -> Iterator[list[str]]:
    """Yield the lines of the table."""
    paths = ModelFiles(path).paths
    states = {"cold": lambda: drop(paths), "warm": lambda: None}
    for state, before in states.items():
        yield [f"read the header, {state}", seconds(lambda: layout_of(path), before, n)]
    check_gguf(path)  # the header is known from here on
    for state, before in states.items():
        yield [f"hash headers and pages, {state}", seconds(lambda: ModelFiles(path), before, n)]
    yield ["hash all, warm", seconds(lambda: digest_of(paths), lambda: None, 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    files = ModelFiles(args.model)
    n_bytes = sum(os.path.getsize(path) for path in files.paths)
    print(f"{machine()}; {len(files.tensors)} tensors, {n_bytes / 1e9:.2f} GB\n")
    print(table(["what", "seconds: median (smallest - largest)"], list(rows(args.model, args.runs))))


if __name__ == "__main__":
    main()
