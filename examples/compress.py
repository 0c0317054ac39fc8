"""Compress a text that was read with KVzip, then ask several questions about what is left of it.

    python examples/compress.py book.txt "Who is the thief?" "Where is the letter?" --keep 0.3
compress() replays the text and keeps the rows that the replay attends to: here three of ten.
"""

import argparse
from pathlib import Path

from pylongctx import Llama

REPLAY = 2200  # tokens of room that compress() uses after the text


def main() -> None:
    """Read and compress the file, and answer the questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("questions", nargs="+", metavar="question")
    parser.add_argument("-m", "--model", default="smollm2-135m", help="GGUF file, or a name of pylongctx get")
    parser.add_argument("--keep", type=float, default=0.3, help="share of the rows that stay (default: 0.3)")
    args = parser.parse_args()

    with Llama(args.model, vocab_only=True, verbose=False) as vocabulary:
        text = vocabulary.tokenize(args.file.read_bytes())
    with Llama(args.model, method="kvzip", n_ctx=len(text) + REPLAY, verbose=False) as llm:
        llm.eval(text)
        before = llm.kv_usage().bytes
        llm.compress(args.keep)
        after = llm.kv_usage().bytes
        print(f"{len(text)} tokens: {before / 2**20:.1f} MiB of KV memory, {after / 2**20:.1f} MiB after compress()")
        for question in args.questions:
            asked = llm.tokenize(f"\n\nQuestion: {question}\nAnswer:".encode(), add_bos=False)
            answer = llm([*text, *asked], max_tokens=32, temperature=0.0)  # continues from the compressed text
            print(f"{question}{answer['choices'][0]['text']}")


if __name__ == "__main__":
    main()
