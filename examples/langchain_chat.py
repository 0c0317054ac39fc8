"""Chat about a text file with LangChain, whose ChatLlamaCpp gets a method that it does not know.

    python examples/langchain_chat.py book.txt "Who is the thief?" qwen2.5-coder-1.5b
Needs pip install langchain-community. LangChain imports llama_cpp, which enable() makes pylongctx.
"""

import argparse
from pathlib import Path

from pylongctx import compat

compat.enable(method="longheads")  # before LangChain imports llama_cpp

from langchain_community.chat_models import ChatLlamaCpp  # noqa: E402


def main() -> None:
    """Answer the question of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("question")
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="GGUF file, or a name of pylongctx get")
    parser.add_argument("-c", "--n-ctx", type=int, default=32768, help="tokens of the context (default: 32768)")
    args = parser.parse_args()

    chat = ChatLlamaCpp(model_path=args.model, n_ctx=args.n_ctx, max_tokens=128, temperature=0, verbose=False)
    messages = [("system", "Answer in one sentence."), ("human", f"{args.file.read_text()}\n\n{args.question}")]
    for chunk in chat.stream(messages):
        print(chunk.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
