"""Stream an answer from the server with the client of OpenAI.

    python examples/openai_client.py "Name three planets." --url http://127.0.0.1:8080
Without --url a server is started for the model and stopped at the end. Needs pip install openai.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from openai import OpenAI


@contextmanager
def server(model: str) -> Iterator[str]:
    """Serve a model on a free port while the block runs, and return the address."""
    command = [sys.executable, "-m", "pylongctx", "serve", model, "--method", "longheads", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr or ():
            if found := re.search(r"serving at (\S+)", line):
                yield found[1]
                return
            print(line, end="", file=sys.stderr)
        raise SystemExit(f"the server ended with exit status {process.wait()}")
    finally:
        process.terminate()
        process.communicate()


def stream(url: str, question: str) -> None:
    """Print an answer while it is written."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    chunks = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": question}], max_tokens=128, stream=True
    )
    for chunk in chunks:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def main() -> None:
    """Answer the question of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="Name three planets, in one line.")
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="GGUF file, or a name of pylongctx get")
    parser.add_argument("--url", help="a server that runs already, such as http://127.0.0.1:8080")
    args = parser.parse_args()
    if args.url:
        return stream(args.url, args.question)
    with server(args.model) as url:
        stream(url, args.question)


if __name__ == "__main__":
    main()
