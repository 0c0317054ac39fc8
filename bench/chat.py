"""A chat on a model whose memory cannot go back: tokens evaluated per turn, compared with unpatched llama-cpp-python.

    python bench/chat.py --model random:qwen3-next-80b:4:q8_0 --turns 30

Messages and answers are random tokens; each marker around them is one token, as in current templates. With history
``whole`` the prompt of a turn has the full answers, with ``no-thoughts`` the answers without their thoughts.
"""

import argparse
import multiprocessing
import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from geometries import model_file
from report import machine, table

from pylongctx.eval.bench.record import physical_cores

MARKERS = (5, 6, 7, 8, 9)  # a turn begins, of the user, of the assistant; a turn ends, a new line
BEGIN, USER, ASSISTANT, END, LINE = MARKERS
STOCK = "llama-cpp-python"
HISTORIES = ("whole", "no-thoughts")


@dataclass(frozen=True)
class Turn:
    """What was said in one turn, in tokens."""

    message: list[int]
    thought: list[int]
    answer: list[int]


def chat(n: int, seed: int = 0) -> list[Turn]:
    """Return turns with messages of 30 tokens, thoughts of 40 and answers of 60, give or take a third."""
    rng = random.Random(seed)

    def some(n: int) -> list[int]:
        return [rng.randrange(10, 250) for _ in range(rng.randint(2 * n // 3, 4 * n // 3))]

    return [Turn(some(30), some(40), some(60)) for _ in range(n)]


def prompt(turns: Sequence[Turn], history: str) -> list[int]:
    """Return the conversation up to where the answer of the last turn begins."""
    tokens = [1]
    for i, turn in enumerate(turns):
        tokens += [BEGIN, USER, LINE, *turn.message, END, LINE, BEGIN, ASSISTANT, LINE]
        if i < len(turns) - 1:
            tokens += [*(turn.thought if history == "whole" else []), *turn.answer, END, LINE]
    return tokens


class Answer:
    """A logits processor that makes a model say given tokens, and notes when it begins to."""

    def __init__(self, tokens: list[int], evaluated: Any) -> None:
        self.tokens = tokens
        self.evaluated = evaluated
        self.n_evaluated, self.began, self.n = 0, 0.0, 0

    def __call__(self, input_ids: Any, logits: Any) -> Any:
        if self.n == 0:
            self.n_evaluated, self.began = self.evaluated(), perf_counter()
        wanted = np.full_like(logits, -np.inf)
        wanted[self.tokens[min(self.n, len(self.tokens) - 1)]] = 0
        self.n += 1
        return wanted


def opened(engine: str, model: str, n_ctx: int, threads: int) -> tuple[Any, Any, Any]:
    """Return a model, what counts the tokens that it evaluated, and what wraps a logits processor."""
    options = {"n_ctx": n_ctx, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    if engine != STOCK:
        from pylongctx import Llama

        llm = Llama(model, method=engine, **options)
        return llm, lambda: llm.session.n_evaluated, lambda processor: processor
    import llama_cpp

    stock, n, evaluate = llama_cpp.Llama(model, **options), [0], llama_cpp.Llama.eval

    def counted(tokens: Sequence[int]) -> None:
        n[0] += len(tokens)
        evaluate(stock, tokens)

    stock.eval = counted
    return stock, lambda: n[0], lambda processor: llama_cpp.LogitsProcessorList([processor])


def run(job: tuple[str, str, str, int, int]) -> list[tuple[int, float]]:
    """Return for each turn how many tokens were evaluated before the answer began, and in how many seconds."""
    engine, history, model, n_turn, threads = job
    turns = chat(n_turn)
    llm, evaluated, wrapped = opened(engine, model, len(prompt(turns, "whole")) + 200, threads)
    found = []
    for i, turn in enumerate(turns):
        before, start = evaluated(), perf_counter()
        answer = Answer([*turn.thought, *turn.answer, END], evaluated)
        tokens = prompt(turns[: i + 1], history)
        llm.create_completion(tokens, max_tokens=len(answer.tokens), temperature=0.0, logits_processor=wrapped(answer))
        found.append((answer.n_evaluated - before, answer.began - start))
    llm.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="random:qwen3-next-80b:4:q8_0", help="a file, a name, or random:GEOMETRY:LAYERS[:WEIGHTS]")
    add("--turns", type=int, default=30)
    add("--threads", type=int, default=physical_cores())
    add("--method", action="append", help="may be repeated; default: full and longheads")
    add("--history", choices=HISTORIES, action="append", help="may be repeated; default: both")
    args = parser.parse_args()
    model, engines = str(model_file(args.model)), [*(args.method or ["full", "longheads"]), STOCK]
    print(f"{machine()}; {args.model}; tokens evaluated before each answer")
    for history in args.history or HISTORIES:
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # two libraries in two processes
            results = pool.map(run, [(engine, history, model, args.turns, args.threads) for engine in engines], 1)
        turns = chat(args.turns)
        sizes = [len(prompt(turns[: i + 1], history)) for i in range(args.turns)]
        rows = [[i + 1, n, *(found[i][0] for found in results)] for i, n in enumerate(sizes)]
        rows.append(["all", sum(sizes), *(sum(n for n, _ in found) for found in results)])
        rows.append(["seconds", "", *(f"{sum(s for _, s in found):.1f}" for found in results)])
        print(f"\nhistory: {history}\n\n{table(['turn', 'prompt', *engines], [[str(x) for x in row] for row in rows])}")


if __name__ == "__main__":
    main()
