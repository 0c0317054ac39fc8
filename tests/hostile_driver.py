"""Load mutated GGUF files, each in a forked child, and print one JSON line per file that ended a child by a signal.

Usage: hostile_driver.py BASE.gguf SCRATCH.gguf FIRST LAST
"""

import json
import os
import random
import sys
from pathlib import Path

from pylongctx import Llama


def n_header(data: bytes) -> int:
    """Return roughly where the tensor infos end: after the name of the last tensor, which is the output matrix."""
    return data.rindex(b"output.weight") + 64


def mutate(data: bytes, seed: int) -> bytes:
    """Truncate, or change a few bytes of header, metadata and tensor infos."""
    rng, end = random.Random(seed), n_header(data)
    if seed % 4 == 0:
        return data[: rng.randrange(end if seed % 8 else len(data))]
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(24 if seed % 4 == 1 else end)
        width = rng.choice([1, 1, 4, 8])
        changed[at : at + width] = rng.choice([rng.randbytes(width), *(bytes([b] * width) for b in (0, 1, 0x7F, 255))])
    return bytes(changed)


def use(path: str) -> int:
    """Load and run the model; 0 when it works, 3 for an exception."""
    try:
        with Llama(path, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False) as llm:
            llm("ab", max_tokens=2)
    except Exception:
        return 3
    return 0


def status(path: str) -> int:
    """Return how a child that uses the file ends."""
    child = os.fork()
    if child == 0:
        code = 4
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            code = use(path)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    base, scratch, first, last = sys.argv[1:]
    data = Path(base).read_bytes()
    for seed in range(int(first), int(last)):
        Path(scratch).write_bytes(mutate(data, seed))
        print(json.dumps([seed, status(scratch)]), flush=True)


if __name__ == "__main__":
    main()
