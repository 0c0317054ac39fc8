"""Memory that an eviction frees: RSS of a process before and after it, compared with what kv_usage reports.

    python bench/memory.py --tokens 16384 --method h2o,budget=4096

All tokens but one are evaluated, then the last one, after which the rule evicts: evict_every is the number of tokens.
"""

import argparse
import os
import random
from pathlib import Path

from geometries import model_file
from report import machine, table

from pylongctx.eval.bench.record import physical_cores

MIB = 2**20
METHODS = ["corm,window=16,recent=256", "h2o,budget=4096"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="random:llama-3-8b:2:q8_0", help="a file, a name, or random:GEOMETRY:LAYERS[:WEIGHTS]")
    add("--threads", type=int, default=physical_cores())
    add("--tokens", type=int, default=16384)
    add("--kv", default="f16,q8_0", help="types of K and V")
    add("--method", action="append", help=f"may be repeated; default: {' and '.join(METHODS)}")
    return parser.parse_args()


def rss() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(model: str, method: str, kv: str, n: int, threads: int) -> list[str]:
    """Return one row of the table."""
    from pylongctx import Llama

    options = {"n_ctx": n + 64, "type_k": kv, "type_v": kv, "n_threads": threads, "n_threads_batch": threads}
    with Llama(model, method=f"{method},evict_every={n}", verbose=False, **options) as llm:
        rng = random.Random(0)
        tokens = [rng.randrange(3, llm.n_vocab()) for _ in range(n)]
        llm.eval(tokens[:-1])
        before, rss_before = llm.kv_usage(), rss()
        llm.eval(tokens[-1:])
        after, rss_after = llm.kv_usage(), rss()
    reported, fallen = before.bytes - after.bytes, rss_before - rss_after
    ratio = f"{fallen / reported:.3f}" if reported else "-"
    sizes = [f"{size / MIB:.1f}" for size in (before.bytes, after.bytes, reported, fallen)]
    return [method, kv, *sizes, ratio]


def main() -> None:
    args = arguments()
    model = model_file(args.model)
    head = ["method", "KV", "held before, MiB", "after", "reported to be free", "RSS fell by", "ratio"]
    jobs = [(method, kv) for kv in args.kv.split(",") for method in args.method or METHODS]
    rows = [measure(model, *job, args.tokens, args.threads) for job in jobs]
    print(f"{machine()}; {Path(model).name}; {args.tokens} tokens\n")
    print(table(head, rows))


if __name__ == "__main__":
    main()
