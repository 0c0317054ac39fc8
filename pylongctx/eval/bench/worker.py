"""One test in its own process with its own peak memory: JSON lines in, JSON lines out.

The first line is the setup; every further line requests one repetition. An exception results in ``error``.
"""

import json
import os
import sys
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx._enums import LOAD_MODES
from pylongctx.eval.bench.record import Case
from pylongctx.eval.peak import peak_memory
from pylongctx.llama import Llama


class BenchRun:
    """An open model that runs one test repeatedly from the same depth.

    The warm-up is the prompt and one token, as in llama-bench.
    """

    def __init__(self, case: Case, method: str, warmup: bool) -> None:
        self.case = case
        self.rng = np.random.default_rng(0)
        names = ("n_ctx", "n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers")
        given: dict[str, Any] = {name: getattr(case, name) for name in names} | LOAD_MODES[case.load_mode]
        self.llm = Llama(case.model_filename, **given, n_threads_batch=case.n_threads, method=method, verbose=False)
        if warmup:
            self._evaluate(case.n_prompt, min(case.n_gen, 1))
        self.llm.reset()
        self.depth_ns = self._prompt(case.n_depth)
        self.runs = 0

    def facts(self) -> dict[str, Any]:
        """Return the fields of a record about the model and the method, with automatic choices filled in."""
        model = self.llm.session.model
        return {
            "model_type": model.description(),
            "model_size": model.info.size,
            "model_n_params": model.info.n_params,
            "method": str(self.llm.method),
        }

    def run(self) -> dict[str, int]:
        """Run the test once; returns nanoseconds, those until the first token, and memory use."""
        if self.runs:
            self._go_back()
        self.runs += 1
        prompt, tokens = self._evaluate(self.case.n_prompt, self.case.n_gen)
        first = (self.depth_ns + prompt) or tokens[0]
        usage = {"kv_bytes": self.llm.kv_usage().bytes, "peak_rss": peak_memory()}
        return {"ns": prompt + sum(tokens), "ttft_ns": first} | usage

    def _evaluate(self, n_prompt: int, n_gen: int) -> tuple[int, list[int]]:
        return self._prompt(n_prompt), [self._timed(token) for token in self._tokens(n_gen).reshape(-1, 1)]

    def _prompt(self, n: int) -> int:
        return self._timed(self._tokens(n)) if n else 0

    def _timed(self, tokens: NDArray[np.int32]) -> int:
        start = perf_counter_ns()
        self.llm.eval(tokens)  # type: ignore[arg-type]
        return perf_counter_ns() - start

    def _tokens(self, n: int) -> NDArray[np.int32]:
        """Return random tokens; a text begins with the model's start token."""
        tokens = self.rng.integers(0, self.llm.n_vocab(), n, np.int32)
        if n and not self.llm.n_tokens and self.llm.session.model.info.add_bos:
            tokens[0] = self.llm.token_bos()
        return tokens

    def _go_back(self) -> None:
        """Rewind to the depth, using a checkpoint for methods that evict.

        The checkpoint is taken after the first repetition, so that its peak memory does not include it.
        """
        depth = self.case.n_depth
        if not depth:
            self.llm.reset()
        elif self.llm.states.checkpoint:
            self.llm.restore()
        elif self.llm.session.rewind(depth) != depth:
            self.llm.reset()
            self._prompt(depth)
            self.llm.checkpoint()


def main() -> None:
    """Serve one test until the input ends."""
    # output of libraries must not mix with the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        setup = json.loads(sys.stdin.readline())
        test = BenchRun(Case(**setup["case"]), setup["method"], setup["warmup"])
        answer(test.facts())
        for _ in sys.stdin:
            answer(test.run())
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as reason:
        answer({"error": str(reason) or type(reason).__name__})


if __name__ == "__main__":
    main()
