"""One engine in one process, for ``scaling.py``: reads a JSON line, answers with a JSON line.

The first line is the setup, every other line a depth to walk to: ``{"depth": ..., "decode": ...}``. An engine that
refuses answers ``{"error": ...}``.
"""

import json
import os
import sys
from time import perf_counter

import numpy as np

LAST = 1024  # tokens before a depth whose rate is that of the depth


class Walker:
    """A model whose context grows from depth to depth."""

    def __init__(self, setup: dict):
        threads = {"n_threads": setup["n_threads"], "n_threads_batch": setup["n_threads"]}
        common = {"n_ctx": setup["n_ctx"], "n_batch": 2048, "n_ubatch": 512, "verbose": False} | threads
        self.llm, self.wait = (self._ours if "method" in setup else self._peer)(setup, common)
        self.rng = np.random.default_rng(0)
        self.tokens, self.seconds = 0, 0.0  # of all prompts so far

    def _ours(self, setup: dict, common: dict):
        from pylongctx import Llama

        kv = {"type_k": setup["kv"], "type_v": setup["kv"]}
        return Llama(setup["model"], method=setup["method"], **kv, **common), lambda: None

    def _peer(self, setup: dict, common: dict):
        import llama_cpp

        kv = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}[setup["kv"]]
        options = {"type_k": kv, "type_v": kv, "flash_attn": setup["flash_attn"]}
        llm = llama_cpp.Llama(setup["model"], **options, **common)
        return llm, lambda: llama_cpp.llama_synchronize(llm.ctx)

    def facts(self) -> dict:
        return {"chosen": str(getattr(self.llm, "method", "full"))}

    def walk(self, depth: int, decode: int) -> dict:
        """Evaluate the prompt up to a depth, then decode tokens; they stay, as a part of the next prompt."""
        missing = depth - self.llm.n_tokens
        last = min(LAST, missing)
        seconds = [self.timed(n) for n in (missing - last, last) if n]
        self.tokens, self.seconds = self.tokens + missing, self.seconds + sum(seconds)
        self.timed(1)  # the first one sets up what the others use again
        return {
            "prefill_mean": self.tokens / self.seconds,
            "prefill_last": last / seconds[-1],
            "token_ms": [1e3 * self.timed(1) for _ in range(decode)],
        }

    def timed(self, n: int) -> float:
        tokens = self.rng.integers(3, self.llm.n_vocab(), n).tolist()
        start = perf_counter()
        self.llm.eval(tokens)
        self.wait()
        return perf_counter() - start


def main() -> None:
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        walker = Walker(json.loads(sys.stdin.readline()))
        answer(walker.facts())
        for line in sys.stdin:
            answer(walker.walk(**json.loads(line)))
    except Exception as reason:
        answer({"error": str(reason) or type(reason).__name__})


if __name__ == "__main__":
    main()
