"""How many draft tokens are right, whether drafts pay or not: each step drafts the same number of tokens.

    python bench/acceptance.py qwen2.5-coder-1.5b --lengths 8192,16384 --window 2048 emma.txt other.txt

The beginning of each text is evaluated once, and 160 tokens are generated greedily after it. The model drafts itself
(``draft="longheads"``). Printed is the share of accepted draft tokens, and the tokens of an answer for each check.
"""

import argparse
import time
from pathlib import Path

from pylongctx import Llama
from pylongctx.catalog import resolve
from pylongctx.engine import draft_length
from pylongctx.files import read_file

ROOM = 256  # tokens of a context after the text


def fix_length(n: int) -> None:
    """Let each draft have ``n`` tokens."""
    draft_length.DraftLength.choose = lambda self, times, n_others, most: min(n, most)  # type: ignore[method-assign]


def measure(model: str, text: str, length: int, window: int, n: int) -> tuple[int, int, int, float]:
    """Return drafts, drafted and accepted tokens, and the seconds of the prefill."""
    draft = f"longheads,window={window}"
    with Llama(resolve(model), n_ctx=length + ROOM, draft=draft, verbose=False) as llm:
        tokens = llm.tokenize(text.encode())[:length]
        if len(tokens) < length:
            raise ValueError(f"the text has {len(tokens)} tokens, fewer than {length}")
        start = time.perf_counter()
        llm.prefill(tokens)
        seconds = time.perf_counter() - start
        bias = {token: -1e9 for token in llm.session.model.end_tokens.tolist()}
        llm(tokens, max_tokens=n, temperature=0.0, logit_bias=bias)
        counters = llm.counters
        return counters.drafts, counters.drafted_tokens, counters.accepted_tokens, seconds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--lengths", default="8192")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--drafts", type=int, default=4, help="tokens of a draft (4)")
    parser.add_argument("-n", type=int, default=160, help="tokens of an answer (160)")
    args = parser.parse_args()
    fix_length(args.drafts)
    print("| text | tokens | accepted | tokens per check | prefill, s |\n|---|---:|---:|---:|---:|")
    for length in map(int, args.lengths.split(",")):
        totals = [0, 0, 0]
        for path in args.texts:
            text = read_file(path).text
            *counts, seconds = measure(args.model, text, length, args.window, args.n)
            totals = [a + b for a, b in zip(totals, counts, strict=True)]
            print(f"| {Path(path).stem} | {length} | {row(*counts)} | {seconds:.0f} |", flush=True)
        print(f"| all | {length} | {row(*totals)} | |", flush=True)


def row(drafts: int, drafted: int, accepted: int) -> str:
    """Return the cells of counts."""
    return f"{100 * accepted / drafted:.1f} % | {1 + accepted / drafts:.2f}"


if __name__ == "__main__":
    main()
