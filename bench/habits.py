"""How many tokens a server evaluates per turn of a conversation, by the habits of clients that break its prefix.

    python bench/habits.py --peer /path/to/llama-server

Every habit is a conversation of ``--turns`` turns on one sequence, with the answers of the model itself. The numbers
are evaluated tokens of each turn's prompt, from the server's own metrics, after what the turn added. A title request
and other requests in between are not counted. Each column is a server with its defaults, or with the options that its
name has; ``--peer`` adds llama-server.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import machine, table

from pylongctx.catalog import resolve

METRIC = "llamacpp:prompt_tokens_total"
SYSTEM = "You are a patient tutor. Answer in full sentences, and say where you are not sure. " * 12
QUESTION = "Question {0}: " + "what should I know about the {1} next, and why does it matter in practice? " * 4
TOPICS = ("tides", "comets", "hinges", "yeast", "glaciers", "looms", "kilns", "sails")
TITLE = "Write a title of three words for this conversation. It begins with a question about the tides."
HEAD = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
PATIENCE = 600.0  # seconds that a model may take to load, or a request to be answered


def question(turn: int) -> str:
    return QUESTION.format(turn, TOPICS[turn % len(TOPICS)])


class Server:
    """A server of one sequence in a process of its own, on a free port."""

    def __init__(self, command: Sequence[str], model: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = ["-m", model, "-c", "8192", "-np", "1", "--host", "127.0.0.1", "--port", str(port), "--metrics"]
        options += ["-t", "1"]  # counts do not depend on it, and threads of a busy machine wait for each other
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([*command, *options], **quiet)
        end = time.monotonic() + PATIENCE
        while not self._is_up():
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit(f"the server did not start: {' '.join([*command, *options])}")
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            return bool(self.get("/health"))
        except OSError:
            return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as response:
            return response.read().decode()

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), HEAD)
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.load(response)

    def evaluated(self) -> int:
        """Return how many tokens of prompts were evaluated so far."""
        lines = self.get("/metrics").splitlines()
        return int(float(next(line.split()[-1] for line in lines if line.startswith(METRIC))))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Client:
    """A conversation by ``/v1/chat/completions``, and the evaluated tokens of its turns."""

    def __init__(self, start: Callable[[], Server]):
        self.start, self.server = start, start()
        self.messages: list[dict] = [{"role": "system", "content": SYSTEM}]
        self.counts: list[int] = []

    def counted(self, path: str, body: dict) -> dict:
        before = self.server.evaluated()
        found = self.server.post(path, {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | body)
        self.counts.append(self.server.evaluated() - before)
        return found

    def ask(self, turn: int, **more: Any) -> str:
        """Send the next question, and append the answer."""
        self.messages.append({"role": "user", "content": question(turn)})
        return self.answer(self.messages, **more)

    def answer(self, messages: list[dict], **more: Any) -> str:
        """Answer some messages, and append the answer to the conversation."""
        found = self.counted("/v1/chat/completions", {"messages": messages} | more)
        said: str = found["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": said})
        return said

    def title(self) -> None:
        """Send a request of another kind, which is not counted."""
        self.server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": TITLE}], "max_tokens": 8})

    def restart(self) -> None:
        self.server.close()
        self.server = self.start()

    def close(self) -> None:
        self.server.close()


# ---- habits: each has a turn as its step ----


def plain(client: Client, turn: int) -> None:
    client.ask(turn)


def title_between(client: Client, turn: int) -> None:
    client.ask(turn)
    client.title()


def regenerated(client: Client, turn: int) -> None:
    """The second answer to the same prompt counts, after a title request."""
    client.ask(turn)
    client.title()
    client.messages.pop()
    client.counts.pop()
    client.answer(client.messages)


def trimmed(client: Client, turn: int) -> None:
    """The client keeps the system prompt and the last three turns."""
    client.messages[1:-4] = []
    client.ask(turn)


def trimmed_with_titles(client: Client, turn: int) -> None:
    trimmed(client, turn)
    client.title()


def attributed(client: Client, turn: int) -> None:
    """Claude Code's first system block changes in every request."""
    head = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn * 7919:05x};"}
    messages = [*client.messages[1:], {"role": "user", "content": question(turn)}]
    system = [head, {"type": "text", "text": SYSTEM}]
    found = client.counted("/v1/messages", {"system": system, "messages": messages})
    client.messages[1:] = [*messages, {"role": "assistant", "content": found["content"][0]["text"]}]


def thoughts_dropped(client: Client, turn: int) -> None:
    """The first half of each answer is reasoning, which the next prompt lacks, as templates of reasoning models do."""
    said = client.ask(turn)
    client.messages[-1]["content"] = said[len(said) // 2 :]


def restarted(client: Client, turn: int) -> None:
    client.ask(turn)
    client.restart()


SMALL, WINDOWS = "smollm2-135m", "gemma-3-270m"
HABITS: dict[str, tuple[str, Callable[[Client, int], None]]] = {
    "nothing special": (SMALL, plain),
    "a title request in between": (SMALL, title_between),
    "the answer regenerated after a title": (SMALL, regenerated),
    "the oldest turn left out": (SMALL, trimmed),
    "the same, a title in between": (SMALL, trimmed_with_titles),
    "a first system block that changes": (SMALL, attributed),
    "thoughts left out of old turns": (SMALL, thoughts_dropped),
    "the server restarted": (SMALL, restarted),
    "sliding windows: a title in between": (WINDOWS, title_between),
    "sliding windows: regenerated after a title": (WINDOWS, regenerated),
    "sliding windows: thoughts left out": (WINDOWS, thoughts_dropped),
    "sliding windows: the server restarted": (WINDOWS, restarted),
}


def turns(command: Sequence[str], model: str, habit: Callable[[Client, int], None], n: int) -> list[int]:
    """Return the evaluated tokens of the second and the later turns."""
    client = Client(lambda: Server(command, model))
    try:
        for turn in range(n):
            habit(client, turn)
    finally:
        client.close()
    return client.counts[1:]


@contextmanager
def columns(peer: str | None, chosen: Sequence[str] | None) -> Iterator[dict[str, list[str]]]:
    """Yield the servers by name."""
    own = [sys.executable, "-m", "pylongctx", "serve"]
    with tempfile.TemporaryDirectory() as folder:
        found = {"pylongctx": own, "pylongctx --cache-reuse 32": [*own, "--cache-reuse", "32"]}
        found["pylongctx --kv-store"] = [*own, "--kv-store", folder]
        if peer:
            found |= {"llama-server": [peer], "llama-server --cache-reuse 32": [peer, "--cache-reuse", "32"]}
        yield {name: command for name, command in found.items() if not chosen or name in chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="llama-server's program")
    parser.add_argument("--turns", type=int, default=6, help="of each conversation")
    parser.add_argument("--habit", action="append", choices=HABITS, help="default: all")
    parser.add_argument("--server", action="append", help="a column; default: all")
    args = parser.parse_args()
    print(machine())
    with columns(args.peer and str(Path(args.peer).resolve()), args.server) as servers:
        rows = []
        for name in args.habit or HABITS:
            kind, habit = HABITS[name]
            rows.append([name])
            for command in servers.values():
                rows[-1].append(" ".join(map(str, turns(command, resolve(kind), habit, args.turns))))
            print(rows[-1], file=sys.stderr, flush=True)
    print(table(["habit", *servers], rows))


if __name__ == "__main__":
    main()
