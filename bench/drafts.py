"""Speed of answers with drafts, as a multiple of the same server without drafts; and that of llama-server.

    python bench/drafts.py model.gguf --kinds ngram-simple,ngram-map-k4v
    python bench/drafts.py model.gguf --kinds ngram-simple,draft-simple --draft small.gguf --vs path/to/llama-server

Each server answers four greedy requests: an edit of a source file, records as JSON, quotes from a text, and a story.
The speed is that of ``timings.predicted_per_second``, the median of ``--runs`` answers after a first one. All servers
run at once and answer in turn, so that a noisy machine slows them alike: the ratio is the median of those of the turns.
With ``--context N``, about N tokens of ``--book`` come before each request.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = (HERE.parent / "pylongctx" / "engine" / "pace.py").read_text(encoding="utf-8")
BOOK = HERE / "emma.txt"
NOVEL = BOOK.read_text(encoding="utf-8")[20000:26000]
CHARACTERS = 4  # of a token, about
RECORDS = "\n".join(f"{i}; row {i}; {i / 8}; 2024-05-{i + 1:02}" for i in range(12))
TEXTS = {
    "edit": f"Rename the class Pace to Tempo. Answer with the whole file and nothing else.\n\n```python\n{SOURCE}```",
    "json": f"Write these rows as a JSON list of objects with id, name, score and when, nothing else.\n\n{RECORDS}",
    "quotes": f"{NOVEL}\n\nQuote the first three paragraphs of this text word by word.",
    "story": "Write a story about a lighthouse keeper and a storm, in 300 words.",
}
PATIENCE = 120  # seconds until a server must be ready


@contextmanager
def served(command: list[str]) -> Iterator[str]:
    """Run a server while the block runs; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError) as reason:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)} does not serve: {reason}") from reason
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(url: str, text: str, n: int) -> dict[str, Any]:
    """Return the answer to a request, at most ``n`` tokens."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": n, "seed": 0}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=3600) as response:
        found: dict[str, Any] = json.load(response)
    return found


def request(args: argparse.Namespace, name: str) -> str:
    """Return the request of a name, after the beginning of the book."""
    before = Path(args.book).read_text(encoding="utf-8")[: CHARACTERS * args.context]
    return f"{before}\n\n{TEXTS[name]}" if before else TEXTS[name]


def measure(urls: dict[str, str], text: str, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the timings of each server's answers; the servers take turns."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in urls}
    for _ in range(1 + args.runs):
        for kind, url in urls.items():
            found[kind].append(ask(url, text, args.n)["timings"])
    return {kind: timings[1:] for kind, timings in found.items()}


def rows(found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Return the cells of a table: tokens per second, as a multiple of the first kind, drafted, accepted."""
    speeds = {kind: [one["predicted_per_second"] for one in timings] for kind, timings in found.items()}
    plain = next(iter(speeds.values()))
    for kind, timings in found.items():
        ratio = statistics.median(mine / other for mine, other in zip(speeds[kind], plain, strict=True))
        drafted, accepted = timings[-1].get("draft_n", 0), timings[-1].get("draft_n_accepted", 0)
        yield f"{kind} | {statistics.median(speeds[kind]):.1f} | {ratio:.2f} | {drafted} | {accepted}"


def options(args: argparse.Namespace, kind: str) -> list[str]:
    """Return the context and the options of a kind of drafts, which both servers have."""
    more = ["-md", args.draft, "--spec-draft-n-max", str(args.n_max)] if kind == "draft-simple" else []
    size = ["-c", str(4096 + args.context + args.context // 4), "-np", "1"]
    return [*size, *(["--spec-type", kind, *more] if kind != "none" else [])]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kinds", default="ngram-simple")
    parser.add_argument("--draft", default="", metavar="FILE")
    parser.add_argument("--n-max", type=int, default=3, help="tokens of a draft of the draft model (3)")
    parser.add_argument("--vs", default="", metavar="LLAMA-SERVER")
    parser.add_argument("--texts", default=",".join(TEXTS))
    parser.add_argument("-n", type=int, default=300, help="tokens of an answer (300)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--context", type=int, default=0, metavar="N", help="tokens before a request (0)")
    parser.add_argument("--book", default=str(BOOK), metavar="FILE", help="they are its beginning (emma.txt)")
    args = parser.parse_args()
    servers = {"pylongctx": [sys.executable, "-m", "pylongctx", "serve"]}
    servers |= {"llama-server": [args.vs]} if args.vs else {}
    print("| server | text | drafts | tokens/s | x none | drafted | accepted |\n|---|---|---|---:|---:|---:|---:|")
    for server, command in servers.items():
        with ExitStack() as stack:
            urls = {
                kind: stack.enter_context(served([*command, "-m", args.model, *options(args, kind)]))
                for kind in ("none", *args.kinds.split(","))
            }
            for name in args.texts.split(","):
                for row in rows(measure(urls, request(args, name), args)):
                    print(f"| {server} | {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
