"""SelfExtend computed densely in numpy, on pass-key prompts too long for the table of cases.

    python bench/dense.py --length 8192 --tests 3

Every score is made from its own relative position (algorithm 1 of arXiv 2401.01325), for one head all pairs of tokens
at once. Printed per prompt: the largest difference of a logit, how often both sides choose the same next token, and
whether each begins the right answer. So it tells a wrong kernel from a model that has reached its end. Takes about
60 bytes per pair of tokens.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import model_oracle
import oracle

from pylongctx import Llama
from pylongctx.eval.passkey import Prompt, load_haystack, make_prompt
from pylongctx.models import embedded_model


class DenseSelfExtend(model_oracle.Model):
    """A llama whose attention sees all pairs of tokens at once."""

    def attention(self, x: np.ndarray, i: int, method: oracle.SelfExtend) -> np.ndarray:
        n_head, n_head_kv = self.meta["attention.head_count"], self.meta["attention.head_count_kv"]
        q, k, v = (self.linear(x, f"blk.{i}.attn_{part}").reshape(len(x), heads, -1).swapaxes(0, 1)
                   for part, heads in (("q", n_head), ("k", n_head_kv), ("v", n_head_kv)))  # fmt: skip
        out = [self.head(q[h], k[h * n_head_kv // n_head], v[h * n_head_kv // n_head], method) for h in range(n_head)]
        return self.linear(np.concatenate(out, axis=1), f"blk.{i}.attn_output")

    def head(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, method: oracle.SelfExtend) -> np.ndarray:
        p, group, window = np.arange(len(q)), method.group_size, method.neighbor_window
        far_q = oracle.rotate(q, p // group + window - window // group, self.rope)
        far = far_q @ oracle.rotate(k, p // group, self.rope).T
        near = oracle.rotate(q, p, self.rope) @ oracle.rotate(k, p, self.rope).T
        distance = p[:, None] - p
        scores = np.where(distance < window, near, far) / np.sqrt(q.shape[1])
        scores[distance < 0] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights @ v / weights.sum(axis=1, keepdims=True)


def compare(model: DenseSelfExtend, llm: Llama, prompt: Prompt) -> str:
    """Return one row of the table."""
    llm.reset()
    llm.eval(prompt.tokens)
    method = oracle.SelfExtend(llm.method.group_size, llm.method.neighbor_window)
    got, want = llm.scores, model.logits(prompt.tokens, method)
    agree = (got.argmax(axis=1) == want.argmax(axis=1)).mean()
    right = [bool(logits[-1].argmax() == prompt.answer[0]) for logits in (got, want)]
    cells = (prompt.trial, f"{abs(got - want).max():.2g}", f"{abs(want).max():.3g}", f"{100 * agree:.2f} %", *right)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--tests", type=int, default=3)
    parser.add_argument("--method", default="selfextend")
    args = parser.parse_args()
    path, haystack = str(embedded_model()), load_haystack("sentences")
    settings = {"type_k": "f32", "type_v": "f32", "logits_all": True, "verbose": False}
    with Llama(path, n_ctx=args.length, method=args.method, **settings) as llm:
        print(f"{llm.method}, {args.length} tokens\n")
        print("| trial | largest difference | largest logit | same next token | ours right | dense right |")
        print("|---|---|---|---|---|---|")
        model = DenseSelfExtend.load(path)
        for trial in range(args.tests):
            print(compare(model, llm, make_prompt(llm.tokenize, haystack, args.length, trial, seed=0)), flush=True)


if __name__ == "__main__":
    main()
