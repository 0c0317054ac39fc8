"""Many prompts at once: answers one by one, together (Llama.complete_many), and by llama-server with as many slots.

    python bench/many.py --model smollm2.gguf --text book.txt --parallel 8,32
    python bench/many.py --model smollm2.gguf --text book.txt --questions 8 --prompt 8192 --parallel 8
    python bench/many.py ... --server llama-server       # an executable of llama.cpp, of the same machine

Prompts are passages of a text of their own; with --questions they are questions about one long passage, which is
evaluated once when they run together. Both programs get the same tokens and write as many, with the same threads. A
row is the median of its turns; each turn begins with an empty cache.
"""

import argparse
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from report import machine, table

from pylongctx import Llama

Prompts = list[list[int]]
PATIENCE = 600.0  # seconds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="GGUF file")
    add("--text", type=Path, default=Path(__file__).with_name("emma.txt"), help="file of a text (bench/emma.txt)")
    add("--prompts", type=int, default=32, help="how many")
    add("--prompt", type=int, default=200, help="tokens of each, or of the passage")
    add("--questions", type=int, default=0, help="about one passage, in place of prompts")
    add("--answer", type=int, default=32, help="tokens of each answer")
    add("--parallel", default="8", help="sequences, such as 8,32")
    add("--method", default="full")
    add("--threads", type=int, default=2)
    add("--turns", type=int, default=3)
    add("--server", help="llama-server")
    return parser.parse_args()


def make_prompts(args: argparse.Namespace) -> Prompts:
    with Llama(args.model, vocab_only=True, verbose=False) as llm:
        tokens = llm.tokenize(args.text.read_bytes())
        if not args.questions:
            return [tokens[args.prompt * i : args.prompt * (i + 1)] for i in range(args.prompts)]
        asked = (f"\n\nQuestion {i}: what does the text say about number {i}? Answer:" for i in range(args.questions))
        return [tokens[: args.prompt] + llm.tokenize(text.encode(), add_bos=False) for text in asked]


def ours(args: argparse.Namespace, prompts: Prompts, n_parallel: int, n_ctx: int) -> Iterator[float]:
    """Yield the seconds of each turn."""
    settings = {"n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False, "method": args.method}
    with Llama(args.model, n_ctx=n_ctx, n_parallel=n_parallel, **settings) as llm:
        endless = {token: -1e4 for token in range(llm.n_vocab()) if llm.session.model.ends_generation(token)}
        for _ in range(args.turns):
            for slot in llm._solo.engine.slots:
                slot.session.clear()
            start = time.perf_counter()
            llm.complete_many(prompts, max_tokens=args.answer, temperature=0.0, logit_bias=endless)
            yield time.perf_counter() - start


@contextmanager
def llama_server(args: argparse.Namespace, n_parallel: int, n_ctx: int) -> Iterator[str]:
    """Yield the address of llama-server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [args.server, "-m", args.model, "-c", n_ctx * n_parallel, "-np", n_parallel, "-t", args.threads]
    words += ["-tb", args.threads, "--port", port, "--no-warmup", "-fa", "on"]
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while time.monotonic() < end and process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health")
                break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def theirs(args: argparse.Namespace, prompts: Prompts, n_parallel: int, n_ctx: int) -> Iterator[float]:
    """Yield the seconds of each turn of llama-server."""

    def ask(url: str, prompt: list[int]) -> None:
        given = {"prompt": prompt, "n_predict": args.answer, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completion", json.dumps(given).encode(), headers)
        assert json.load(urllib.request.urlopen(request, timeout=PATIENCE))["tokens_predicted"] == args.answer

    for _ in range(args.turns):
        with llama_server(args, n_parallel, n_ctx) as url, ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            list(pool.map(lambda prompt: ask(url, prompt), prompts))
            seconds = time.perf_counter() - start
        yield seconds


def main() -> None:
    args = arguments()
    prompts = make_prompts(args)
    n_ctx = -(-(max(map(len, prompts)) + args.answer + 8) // 256) * 256
    counts = [1, *map(int, args.parallel.split(","))]
    runs = {f"pylongctx, {n} at a time": ours(args, prompts, n, n_ctx) for n in counts}
    if args.server:
        runs |= {f"llama-server, {n} slots": theirs(args, prompts, n, n_ctx) for n in counts}
    print(machine(), flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.turns):
        for name, turns in runs.items():
            seconds[name].append(next(turns))
    rows, first, n_tokens = [], median(next(iter(seconds.values()))), len(prompts) * args.answer
    for name, taken in seconds.items():
        spread = f"{min(taken):.1f} - {max(taken):.1f} s"
        rows.append([name, f"{median(taken):.1f} s", spread, f"{n_tokens / median(taken):.0f}"])
        rows[-1].append(f"{first / median(taken):.2f}")
    print(table(["", "median", "range", "tokens/s written", "times one by one"], rows))


if __name__ == "__main__":
    main()
