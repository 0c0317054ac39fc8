"""What drafts change: answers with and without them, after passages of a text.

    python bench/exact.py smollm2-135m gemma-3-270m --kv f16,q8_0,q4_0 --deterministic --text emma.txt
    python bench/exact.py smollm2-135m gemma-3-270m --passages 50 --text emma.txt

The model drafts itself (``draft="longheads"``), four tokens in each step. Printed is how many greedy answers differ,
how many last logits differ in any bit, and the largest gap between the two most probable tokens where an answer first
differs, in logits. With ``--deterministic``, nothing may differ.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from acceptance import fix_length
from numpy.typing import NDArray
from report import machine, table

from pylongctx import Llama
from pylongctx.catalog import resolve
from pylongctx.readers.files import read_file

HEAD = ["model", "KV", "answers", "differ", "last logits differ", "largest gap", "drafted", "accepted"]


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, the gap in logits between the best two candidates of each, and the last logits."""

    tokens: list[str]
    gaps: list[float]
    logits: NDArray[np.float32]


def answers(llm: Llama, passages: list[list[int]], n: int) -> Iterator[Answer]:
    """Yield a greedy answer of ``n`` tokens after each passage."""
    ends = {token: -1e9 for token in llm.session.model.end_tokens.tolist()}
    for tokens in passages:
        found = llm(tokens, max_tokens=n, temperature=0.0, logprobs=2, logit_bias=ends)["choices"][0]["logprobs"]
        best = [sorted(top.values(), reverse=True) for top in found["top_logprobs"]]
        yield Answer(found["tokens"], [top[0] - top[1] for top in best], llm.session.last_logits.copy())


def compare(args: argparse.Namespace, model: str, kv: str, text: str) -> list[str]:
    """Return the row of one model and KV cache type."""
    type_k, _, type_v = kv.partition("/")
    given = {"n_ctx": args.length + args.n + 64, "type_k": type_k, "type_v": type_v or type_k, "verbose": False}
    given |= {"deterministic": args.deterministic}
    with Llama(resolve(model), **given) as llm:
        tokens = llm.tokenize(text.encode())
        step = max(1, (len(tokens) - args.length) // args.passages)
        passages = [tokens[i * step : i * step + args.length] for i in range(args.passages)]
        plain = list(answers(llm, passages, args.n))
    with Llama(resolve(model), draft=args.draft, **given) as llm:
        drafted = list(answers(llm, passages, args.n))
        counters = llm.counters
    pairs = list(zip(plain, drafted, strict=True))
    bits = sum(not np.array_equal(a.logits, b.logits) for a, b in pairs)
    gaps = [
        next(gap for gap, x, y in zip(a.gaps, a.tokens, b.tokens, strict=True) if x != y)
        for a, b in pairs
        if a.tokens != b.tokens
    ]
    counts = [str(len(pairs)), str(len(gaps)), str(bits), f"{max(gaps):.3f}" if gaps else ""]
    return [model, kv, *counts, str(counters.drafted_tokens), str(counters.accepted_tokens)]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", required=True, help="a file that has several passages")
    parser.add_argument("--kv", default="f16", help="types of K and V, as in f16,q8_0,q8_0/f16")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--length", type=int, default=700, help="tokens of a passage (700)")
    parser.add_argument("--draft", default="longheads,window=256")
    parser.add_argument("-n", type=int, default=64, help="tokens of an answer (64)")
    args = parser.parse_args()
    fix_length(4)
    text = read_file(args.text).text
    print(f"{machine()}; deterministic={args.deterministic}\n", flush=True)
    for model in args.models:
        rows = [compare(args, model, kv, text) for kv in args.kv.split(",")]
        print(f"{table(HEAD, rows)}\n", flush=True)


if __name__ == "__main__":
    main()
