"""Which chunks a buffer of kv_offload should hold: three rules on the chunks that the heads of a real text read.

    python bench/residency.py --model smollm2-135m --text emma.txt --tokens 7680 --frames 32,64,128,192,256

The chunks of some tokens after the text are recorded, without those that every token reads. Then rules are simulated:
the least recently read chunk makes room; the rule of kv_offload (native/ops/staging.h); and the fixed set that is read
most often, in hindsight. Printed is the fraction of the chunks that are in the buffer when they are read.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from geometries import model_file
from report import machine, table

from pylongctx import Llama
from pylongctx.cli.arguments import int_list

WARM = 32  # tokens that fill the buffer and are not counted
RUNS = 8  # that the rule looks back on
Reads = list[np.ndarray]  # chunks that each token reads


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--text", type=Path, required=True)
    add("--tokens", type=int, default=7680)
    add("--decode", type=int, default=256, help="tokens after them whose chunks are recorded")
    add("--heads", type=int, default=16, help="KV heads, chosen at random")
    add("--frames", type=int_list, default="32,64,128,192,256", help="sizes of the buffer, in chunks of a head")
    return parser.parse_args()


def record(args: argparse.Namespace) -> tuple[list[Reads], int]:
    """Return what some KV heads read, and the number of chunks of the text."""
    n, end = args.tokens, args.tokens + args.decode
    with Llama(model_file(args.model), n_ctx=end + 1, method="longheads", verbose=False) as llm:
        tokens = llm.tokenize(args.text.read_bytes())[:end]
        size, recent = llm.method.chunk_size, llm.method.n_recent
        llm.eval(tokens[:n])
        llm.session.context.start_trace(n, end)
        for token in tokens[n:]:
            llm.eval([token])
        positions, chunks = llm.session.context.read_trace()
        n_head_kv = llm.kv_usage().rows.shape[1]
    n_layer, n_head = chunks.shape[1:3]
    heads = np.random.default_rng(0).permutation(n_layer * n_head_kv)[: args.heads]
    group = n_head // n_head_kv
    found = []
    for layer, head in (divmod(int(i), n_head_kv) for i in heads):
        of_head = chunks[:, layer, head * group : (head + 1) * group]
        lists = [np.unique(one) for one in of_head]
        found.append([one[(one > 0) & (one < p // size - recent)] for one, p in zip(lists, positions, strict=True)])
    return found, end // size


Worth = Callable[[np.ndarray, np.ndarray], np.ndarray]


def hits(reads: Reads, n_frame: int, n_chunk: int, worth: Worth) -> float:
    """Return the fraction of chunks that are in the buffer; worth(used, last) ranks them."""
    used = np.zeros((RUNS, n_chunk + 1), bool)  # 0, 1, 2 ... tokens ago
    last = np.full(n_chunk + 1, -1)  # token that read it
    held = np.zeros(n_chunk + 1, bool)
    n_hit = n_all = 0
    for i, read in enumerate(reads):
        used = np.roll(used, 1, axis=0)
        used[0] = False
        used[0, read], last[read] = True, i
        if i >= WARM:
            n_hit, n_all = n_hit + held[read].sum(), n_all + len(read)
        rank = worth(used, last)
        missing = read[~held[read]]
        missing = missing[np.argsort(-rank[missing], kind="stable")]
        free = np.flatnonzero(held & ~used[0])
        free = free[np.argsort(rank[free], kind="stable")]
        room = n_frame - int(held.sum())
        held[missing[:room]] = True
        for new, old in zip(missing[room:], free, strict=False):
            if rank[old] > rank[new]:
                break
            held[[new, old]] = True, False
    return n_hit / n_all


def recency(used: np.ndarray, last: np.ndarray) -> np.ndarray:
    return last


def count(used: np.ndarray, last: np.ndarray) -> np.ndarray:
    return used.sum(axis=0) * (1 << 20) + last


def fixed(reads: Reads, n_frame: int, n_chunk: int) -> float:
    times = np.bincount(np.concatenate(reads), minlength=n_chunk + 1)
    best = np.argsort(-times)[:n_frame]
    rest = np.concatenate(reads[WARM:])
    return float(np.isin(rest, best).mean())


def main() -> None:
    args = arguments()
    heads, n_chunk = record(args)
    n_read = np.mean([len(one) for reads in heads for one in reads])
    rows = []
    for n in args.frames:
        rates = [[hits(r, n, n_chunk, recency), hits(r, n, n_chunk, count), fixed(r, n, n_chunk)] for r in heads]
        rows.append([str(n), *(f"{rate:.0%}" for rate in np.mean(rates, axis=0))])
    print(f"{machine()}; {args.model}; {args.text.name}; a token reads {n_read:.0f} of {n_chunk} chunks of a head\n")
    print(table(["buffer, chunks of a head", "least recently read", "kv_offload", "best fixed, in hindsight"], rows))


if __name__ == "__main__":
    main()
