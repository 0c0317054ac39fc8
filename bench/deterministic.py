"""What deterministic=True costs: the same steps with and without it, in turns in one process.

    python bench/deterministic.py --model smollm2.gguf --depths 0,8192

The steps are 512 tokens of a prompt, single tokens, and 5 tokens as in a draft, each after a prefix of every
length in ``--depths``. Times are medians; the ratio is the median of the ratios of all turns.
"""

import argparse
from statistics import median
from time import perf_counter, process_time

import numpy as np
from geometries import model_file
from report import machine, table

from pylongctx import Llama
from pylongctx.cli.arguments import int_list
from pylongctx.eval.bench.record import physical_cores

STEPS = {"512 tokens of a prompt": (512, 1), "a token": (1, 16), "5 tokens": (5, 4)}  # tokens, times


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="random:llama-3-8b:2", help="a file, a name, or random:GEOMETRY:LAYERS[:WEIGHTS]")
    add("--method", default="full")
    add("--kv", default="f16", help="type of K and V")
    add("--threads", type=int, default=physical_cores())
    add("--depths", type=int_list, default="0,8192")
    add("--turns", type=int, default=7)
    add("--cpu-time", action="store_true", help="count the time of the processor: for a machine that others use")
    return parser.parse_args()


def measure(llms: dict[bool, Llama], depth: int, turns: int, clock) -> dict[tuple[str, bool], list[float]]:
    """Return the seconds of every step, without and with it."""
    n_vocab = llms[False].n_vocab()
    tokens = np.random.default_rng(depth).integers(n_vocab // 8, n_vocab, depth + 512).tolist()
    for llm in llms.values():
        llm.reset()
        if depth:
            llm.eval(tokens[:depth])
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(turns):
        for (name, (n, repeats)), (on, llm) in ((step, each) for step in STEPS.items() for each in llms.items()):
            begin = clock()
            for i in range(repeats):
                llm.eval(tokens[depth + i * n : depth + (i + 1) * n])
            times.setdefault((name, on), []).append((clock() - begin) / repeats)
            llm.n_tokens = depth
    return times


def main() -> None:
    args = arguments()
    given = {"n_ctx": max(args.depths) + 1024, "method": args.method, "type_k": args.kv, "type_v": args.kv}
    given |= {"n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False}
    llms = {on: Llama(model_file(args.model), deterministic=on, **given) for on in (False, True)}
    rows = []
    for depth in args.depths:
        times = measure(llms, depth, args.turns, process_time if args.cpu_time else perf_counter)
        for name in STEPS:
            off, on = times[name, False], times[name, True]
            ratio = median(b / a for a, b in zip(off, on, strict=True))
            rows.append([name, f"{depth}", f"{median(off) * 1e3:.1f}", f"{median(on) * 1e3:.1f}", f"{ratio:.2f}"])
    print(f"{args.model}, {args.method}, K and V in {args.kv}, {args.threads} threads. {machine()}\n")
    print(table(["", "after tokens", "ms", "deterministic, ms", "ratio"], rows))


if __name__ == "__main__":
    main()
