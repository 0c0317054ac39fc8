"""Perplexity of the last tokens of passages, per method and length.

    python bench/perplexity.py FILE --lengths 512,4096 --method full --method selfextend

Only the last tokens count, so that lengths are comparable: all of them are predicted from a context of that length.
The passages start at the same places for every method and end at the same places for every length.
"""

import argparse
import math
import os
from pathlib import Path

import numpy as np
from report import machine, table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", type=Path, help="plain text")
    add("--model", help="GGUF file; default: the embedded model")
    add("--lengths", default="512,4096")
    add("--last", type=int, default=256, help="tokens scored at the end of each passage")
    add("--passages", type=int, default=3)
    add("--method", action="append", help="method string; may be repeated; default: full and selfextend")
    add("--kv", default="f16", help="type of K and V")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def passages(tokens: list[int], longest: int, n: int) -> list[list[int]]:
    """Return ``n`` evenly spread passages of the longest length; shorter ones are their ends."""
    if len(tokens) < longest:
        raise SystemExit(f"the text has {len(tokens)} tokens, the longest passage needs {longest}")
    starts = np.linspace(0, len(tokens) - longest, n).astype(int)
    return [tokens[start : start + longest] for start in starts]


def negative_log_likelihood(llm, passage: list[int], last: int) -> float:
    """Return the mean over the last tokens, each predicted from everything before it."""
    llm.reset()
    llm.eval(passage)
    n = len(passage)
    logits = np.asarray(llm.scores[n - last - 1 : n - 1], dtype=np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_probability = logits[np.arange(last), passage[n - last :]] - np.log(np.exp(logits).sum(-1))
    return -log_probability.mean()


def row(args: argparse.Namespace, model: str, method: str, texts: list[list[int]], lengths: list[int]) -> list[str]:
    """Return the table row of one method; n_ctx is each length, so automatic choices fit it."""
    from pylongctx import Llama

    cells = [method]
    for length in lengths:
        options = {"n_ctx": length, "type_k": args.kv, "type_v": args.kv, "logits_all": True, "verbose": False}
        with Llama(model, method=method, n_threads=args.threads, n_threads_batch=args.threads, **options) as llm:
            losses = [negative_log_likelihood(llm, text[-length:], args.last) for text in texts]
        each = ", ".join(f"{math.exp(loss):.1f}" for loss in losses)
        cells.append(f"{math.exp(float(np.mean(losses))):.2f} ({each})")
    return cells


def main() -> None:
    from pylongctx import Llama
    from pylongctx.models import embedded_model

    args = arguments()
    model = str(args.model or embedded_model())
    lengths = sorted(int(length) for length in args.lengths.split(","))
    if args.last >= lengths[0]:
        raise SystemExit(f"--last {args.last} must be smaller than the shortest length {lengths[0]}")
    with Llama(model, vocab_only=True, verbose=False) as llm:
        tokens = llm.tokenize(args.file.read_bytes(), add_bos=False)
    texts = passages(tokens, lengths[-1], args.passages)
    lines = [row(args, model, method, texts, lengths) for method in args.method or ["full", "selfextend"]]
    print(f"{machine()}; {Path(model).name}; {args.file.name}; perplexity of the last {args.last} tokens of "
          f"{args.passages} passages, {args.kv} KV; in brackets each passage\n")  # fmt: skip
    print(table(["method", *(f"{length} tokens" for length in lengths)], lines))


if __name__ == "__main__":
    main()
