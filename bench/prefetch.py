"""Would a guess have brought the pages that a token misses when K and V lie in memory of the host?

    python bench/prefetch.py --text emma.txt --tokens 8192

The choices of all heads are recorded while tokens are decoded, and replayed with least-recently-used pages of every KV
head. For each guess: the share of misses that it names, and how many pages it would bring in vain for each of them.
"""

import argparse
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from report import machine, table

from pylongctx import Llama
from pylongctx.bench.case import model_file
from pylongctx.eval.passkey import SENTENCES
from pylongctx.models import embedded_model

PAGE_ROWS = 64
Pages = list[list[list[set[int]]]]  # [token][layer][KV head]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(embedded_model()), help="as pylongctx bench takes it")
    add("--method", default="longheads")
    add("--text", type=Path, help="a novel, for instance; default: the sentences of the pass-key test")
    add("--tokens", type=int, default=8192)
    add("--decode", type=int, default=128)
    add("--room", default="1,2,4", help="pages of a head, in those that a token may read")
    return parser.parse_args()


def record(args: argparse.Namespace) -> Pages:
    """Return the pages that every KV head reads for every token that is decoded."""
    with Llama(
        model_file(args.model), method=args.method, n_ctx=args.tokens + args.decode + 1, verbose=False, seed=0
    ) as llm:
        text = args.text.read_text() if args.text else SENTENCES
        llm.eval(llm.tokenize((text * (8 * args.tokens // len(text) + 1)).encode())[: args.tokens])
        with llm.trace() as trace:
            for _ in islice(llm.generate([], reset=False, temp=0.8), args.decode):
                pass
        n_head_kv, size = llm.kv_usage().rows.shape[1], trace.chunk_size
    return [
        [
            [{page for c in heads.flat if 0 <= c <= args.tokens for page in pages(int(c), size)} for heads in layer]
            for layer in token.reshape(token.shape[0], n_head_kv, -1)
        ]
        for token in trace.chunks
    ]


def pages(chunk: int, size: int) -> range:
    return range(chunk * size // PAGE_ROWS, ((chunk + 1) * size - 1) // PAGE_ROWS + 1)


def guesses(read: Pages, token: int, layer: int, head: int) -> Iterator[tuple[str, set[int]]]:
    """What could be brought before this layer chooses."""
    before = read[token - 1][layer]
    yield "the neighbours of its last pages", {page + step for page in before[head] for step in (-1, 1)}
    yield "the last pages of all heads of the layer", set().union(*before)
    if layer > 0:
        yield "this token's pages in the layer before", set().union(*read[token][layer - 1])


def replay(read: Pages, n_slot: int) -> tuple[float, dict[str, tuple[int, int, int]]]:
    """Return the share of pages that are missed, and per guess: misses, those it names, pages in vain."""
    kept = [[OrderedDict.fromkeys(head) for head in layer] for layer in read[0]]
    n_read = n_miss = 0
    found: dict[str, tuple[int, int, int]] = {}
    for token in range(1, len(read)):
        for layer, heads in enumerate(read[token]):
            for head, wanted in enumerate(heads):
                here = kept[layer][head]
                missed = wanted - here.keys()
                n_read, n_miss = n_read + len(wanted), n_miss + len(missed)
                for name, guess in guesses(read, token, layer, head):
                    n, named, vain = found.get(name, (0, 0, 0))
                    useless = len(guess - wanted - here.keys())
                    found[name] = n + len(missed), named + len(guess & missed), vain + useless
                for page in wanted:
                    here[page] = None
                    here.move_to_end(page)
                while len(here) > n_slot:
                    here.popitem(last=False)
    return n_miss / n_read, found


def main() -> None:
    args = arguments()
    read = record(args)
    most = max(len(head) for token in read for layer in token for head in layer)
    rows = []
    for room in map(float, args.room.split(",")):
        share, found = replay(read, int(room * most))
        for name, (n, named, vain) in found.items():
            rows.append(
                [f"{room:g}", f"{100 * share:.1f} %", name, f"{100 * named / n:.0f} %", f"{vain / max(1, named):.0f}"]
            )
    print(f"{machine()}; {Path(args.model).name}; {args.method}; {args.tokens} tokens, then {args.decode}\n")
    print(table(["room", "missed", "guess", "misses it names", "in vain for each"], rows))


if __name__ == "__main__":
    main()
