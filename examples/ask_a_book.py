"""Stream an answer about a text file that may be longer than the model's trained context.

    python examples/ask_a_book.py book.txt "Who is the thief?" qwen2.5-coder-1.5b
The context is sized for the text, and LongHeads reads what lies beyond the trained length.
"""

import argparse
from pathlib import Path

from pylongctx import Llama

ANSWER = 256  # tokens


def main() -> None:
    """Answer the question of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("question")
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="GGUF file, or a name of pylongctx get")
    args = parser.parse_args()

    messages = [{"role": "user", "content": f"{args.file.read_text()}\n\n{args.question}"}]
    with Llama(args.model, vocab_only=True, verbose=False) as vocabulary:
        n_tokens = len(vocabulary.tokenize(messages[0]["content"].encode()))
    with Llama(args.model, method="longheads", n_ctx=n_tokens + 2 * ANSWER) as llm:
        for chunk in llm.create_chat_completion(messages, max_tokens=ANSWER, temperature=0.0, stream=True):
            print(chunk["choices"][0]["delta"].get("content", ""), end="", flush=True)
        print(f"\n{llm.n_tokens} tokens in {llm.kv_usage().bytes / 2**20:.1f} MiB of KV memory")


if __name__ == "__main__":
    main()
