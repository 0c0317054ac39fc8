"""One engine in one process: reads a JSON line, answers with a JSON line.

The first line is the setup, every other line a request ``{"n_prompt": ..., "n_decode": ...}``; the answer holds the
seconds of the whole prompt and of each decoded token. An engine that refuses its settings answers ``{"error": ...}``.
"""

import json
import os
import random
import sys
from time import perf_counter


def open_ours(setup: dict):
    """Open the model with pylongctx; return it with a function that waits until it is done."""
    from pylongctx import Llama

    llm = Llama(setup["model"], method=setup["method"], type_k=setup["kv"], type_v=setup["kv"], **common(setup))
    return llm, lambda: None


def open_peer(setup: dict):
    """Open the model with the installed llama_cpp package."""
    import llama_cpp

    kv = {"f32": 0, "f16": 1, "q8_0": 8}[setup["kv"]]
    llm = llama_cpp.Llama(setup["model"], type_k=kv, type_v=kv, flash_attn=setup["flash_attn"], **common(setup))
    return llm, lambda: llama_cpp.llama_synchronize(llm.ctx)


def common(setup: dict) -> dict:
    threads = {"n_threads": setup["n_threads"], "n_threads_batch": setup["n_threads"]}
    return {"n_ctx": setup["n_ctx"], "n_batch": 512, "n_ubatch": 512, "verbose": False} | threads


def measure(llm, wait, n_prompt: int, n_decode: int) -> dict:
    """Evaluate a random prompt, then random tokens one by one at its end."""
    rng = random.Random(0)
    tokens = [rng.randrange(3, llm.n_vocab()) for _ in range(n_prompt + n_decode)]
    llm.reset()
    prefill = timed(llm, wait, tokens[:n_prompt])
    return {"prefill": prefill, "decode": [timed(llm, wait, [token]) for token in tokens[n_prompt:]]}


def timed(llm, wait, tokens: list[int]) -> float:
    start = perf_counter()
    llm.eval(tokens)
    wait()
    return perf_counter() - start


def main() -> None:
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict) -> None:
        print(json.dumps(message), file=answers, flush=True)

    setup = json.loads(sys.stdin.readline())
    try:
        llm, wait = (open_ours if setup["engine"] == "ours" else open_peer)(setup)
    except Exception as reason:
        return answer({"error": str(reason)})
    answer({"ready": True})
    for line in sys.stdin:
        answer(measure(llm, wait, **json.loads(line)))


if __name__ == "__main__":
    main()
