"""Read a text once: a second process takes K and V from the store and answers at once.

    python examples/store.py book.txt "Who is the thief?" qwen2.5-coder-1.5b --store kv
Each of the two processes prints how many tokens came from the store and when its first token came.
"""

import argparse
import time
from multiprocessing import get_context
from pathlib import Path

from pylongctx import Llama


def ask(process: str, model: str, prompt: str, n_ctx: int, store: str) -> None:
    """Answer one question in a process of its own."""
    messages = [{"role": "user", "content": prompt}]
    with Llama(model, method="longheads", n_ctx=n_ctx, kv_store=store, verbose=False) as llm:
        start, first, answer = time.perf_counter(), 0.0, ""
        for chunk in llm.create_chat_completion(messages, max_tokens=64, temperature=0.0, stream=True):
            answer += chunk["choices"][0]["delta"].get("content") or ""
            first = first or (time.perf_counter() - start if answer else 0.0)
        n_stored = llm.kv_store_usage().tokens
    print(f"{process} process: {n_stored} tokens from the store, first token after {first:.2f} s: {answer}")


def main() -> None:
    """Ask the same question in two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("question")
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="GGUF file, or a name of pylongctx get")
    parser.add_argument("--store", default="kv", help="folder that keeps K and V (default: kv)")
    parser.add_argument("-c", "--n-ctx", type=int, default=32768, help="tokens of the context (default: 32768)")
    args = parser.parse_args()

    prompt = f"{args.file.read_text()}\n\n{args.question}"
    for name in ("first", "second"):
        process = get_context("spawn").Process(target=ask, args=(name, args.model, prompt, args.n_ctx, args.store))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"the {name} process ended with exit status {process.exitcode}")


if __name__ == "__main__":
    main()
