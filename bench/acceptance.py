"""How many draft tokens are right, whether drafts pay or not: each step drafts the same number of tokens.

    python bench/acceptance.py qwen2.5-coder-1.5b --lengths 8192,16384 emma.txt other.txt

Of each text the first tokens are evaluated, and 160 tokens are generated after them, greedily unless there is a
``--temperature``; then the text continues to the next length. With a ``--seed`` drafts are compared with what is drawn,
otherwise they are accepted by rejection sampling. The model drafts itself (``draft="longheads"``). Printed is the share
of accepted draft tokens, and the tokens of an answer for each check. A text that is too short for a length is left out.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from pylongctx import Llama
from pylongctx.catalog import resolve
from pylongctx.engine import drafting
from pylongctx.engine.job import Counters
from pylongctx.readers.files import read_file

ROOM = 256  # tokens of a context after the text


def fix_length(n: int) -> None:
    """Let each draft have ``n`` tokens."""
    drafting.DraftLength.choose = lambda self, times, n_others, most: min(n, most)  # type: ignore[method-assign]


def counts(counters: Counters) -> tuple[int, int, int]:
    """Return drafts, drafted and accepted tokens so far."""
    return counters.drafts, counters.drafted_tokens, counters.accepted_tokens


def measure(args: argparse.Namespace, text: str) -> Iterator[tuple[int, list[int], float]]:
    """Yield for each length: drafts, drafted and accepted tokens, and the seconds of the prefill."""
    with Llama(resolve(args.model), n_ctx=max(args.lengths) + ROOM, draft=args.draft, verbose=False) as llm:
        tokens = llm.tokenize(text.encode())[: max(args.lengths)]
        ends = {token: -1e9 for token in llm.session.model.end_tokens.tolist()}
        for length in args.lengths:
            if len(tokens) < length:
                return
            start, before = time.perf_counter(), counts(llm.counters)
            llm.prefill(tokens[:length])
            seconds = time.perf_counter() - start
            llm(tokens[:length], max_tokens=args.n, temperature=args.temperature, seed=args.seed, logit_bias=ends)
            yield length, [now - then for now, then in zip(counts(llm.counters), before, strict=True)], seconds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--lengths", default=[8192], type=lambda text: sorted(map(int, text.split(","))))
    parser.add_argument("--draft", default="longheads,window=2048")
    parser.add_argument("--drafts", type=int, default=4, help="tokens of a draft (4)")
    parser.add_argument("-n", type=int, default=160, help="tokens of an answer (160)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    fix_length(args.drafts)
    totals = {length: [0, 0, 0, 0] for length in args.lengths}
    print("| text | tokens | accepted | tokens per check | prefill, s |\n|---|---:|---:|---:|---:|", flush=True)
    for path in args.texts:
        for length, found, seconds in measure(args, read_file(path).text):
            totals[length] = [a + b for a, b in zip(totals[length], [1, *found], strict=True)]
            print(f"| {Path(path).stem} | {length} | {row(*found)} | {seconds:.0f} |", flush=True)
    for length, (n, *found) in totals.items():
        print(f"| {n} texts | {length} | {row(*found) if n else '|'} | |")


def row(drafts: int, drafted: int, accepted: int) -> str:
    """Return the cells of counts."""
    return f"{100 * accepted / drafted:.1f} % | {1 + accepted / drafts:.2f}"


if __name__ == "__main__":
    main()
