"""Send damaged requests of every route to a server in a process of its own: ``fuzz.py`` explains the lines."""

import copy
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from tries import Line

from pylongctx.models import embedded_model
from pylongctx.serve.bodies import ChatBody, CompletionBody, InfillBody, NativeBody, TokenizeBody

LIMIT = 60.0  # seconds that an answer may take
CHECK_EVERY = 50  # requests
METHOD = "longheads,chunk_size=16,window=64"
OPTIONS = [
    "--method",
    METHOD,
    "-a",
    "tiny",
    "-c",
    "512",
    "-np",
    "2",
    "-ub",
    "64",
    "-t",
    "1",
    "--max-body",
    "4",
    "--deterministic",
    "--cache-ram",
    "16",
]
ASKED = [{"role": "user", "content": "How many?"}]
TOOL = {"name": "go", "description": "Go", "parameters": {"type": "object", "properties": {"far": {"type": "integer"}}}}
CALL = {"id": "a1", "type": "function", "function": {"name": "go", "arguments": '{"far": 3}'}}
CALLED = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
CALLED += [{"role": "tool", "tool_call_id": "a1", "content": "gone"}]
USED = [*ASKED, {"role": "assistant", "content": [{"type": "tool_use", "id": "a1", "name": "go", "input": {"far": 3}}]}]
USED += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a1", "content": "gone"}]}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}, "s": {"pattern": "^a+$"}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FEW = {"max_tokens": 4, "temperature": 0}
SENT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "It was", "logprobs": 2, "stop": ["x"], **FEW}),
    ("/v1/completions", {"prompt": [[1, 300], [400]], "n": 2, "stream": True, "logit_bias": {"5": -1}, **FEW}),
    ("/v1/completions", {"prompt": "a", "grammar": 'root ::= "yes" | [a-c]{2,4}', "seed": 3, **FEW}),
    ("/v1/chat/completions", {"messages": ASKED, "stream": True, "stream_options": {"include_usage": True}, **FEW}),
    ("/v1/chat/completions", {"messages": CALLED, "tools": [{"type": "function", "function": TOOL}], **FEW}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}, *ASKED], **FEW}),
    (
        "/v1/chat/completions",
        {"messages": ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, **FEW},
    ),
    ("/v1/chat/completions/input_tokens", {"messages": ASKED}),
    ("/completion", {"prompt": "It was", "n_predict": 4, "n_probs": 2, "samplers": ["top_k", "min_p"], "id_slot": 0}),
    ("/v1/messages", {"messages": USED, "system": [{"type": "text", "text": "Be kind."}], "tools": [], **FEW}),
    ("/v1/messages", {"messages": ASKED, "stream": True, "thinking": {"type": "enabled", "budget_tokens": 9}, **FEW}),
    ("/v1/messages/count_tokens", {"messages": USED}),
    ("/v1/responses", {"input": [{"role": "user", "content": "How?"}], "max_output_tokens": 4, "temperature": 0}),
    (
        "/v1/responses",
        {"input": "How?", "tools": [{"type": "function", **TOOL}], "stream": True},
    ),
    ("/api/chat", {"messages": ASKED, "options": {"num_predict": 4}, "format": SCHEMA}),
    ("/api/generate", {"prompt": "It was", "raw": True, "options": {"num_predict": 4, "top_k": 3}}),
    ("/api/show", {"model": "tiny"}),
    ("/tokenize", {"content": "It was", "add_special": True, "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 300, 400]}),
    ("/apply-template", {"messages": CALLED}),
    ("/render", {"text": "# a\n\n$x^2$ `b` | c |"}),
    (
        "/v1/longctx/quotes",
        {"question": "What?", "answer": "A stone", "files": [{"name": "a", "text": "A stone."}]},
    ),
    ("/slots/1?action=save", {"filename": "a"}),
    ("/slots/1?action=restore", {"filename": "a"}),
    ("/slots/1?action=erase", {}),
    ("/v1/streams/lookup", {"conversation_ids": ["a"]}),
]
FIELDS = sorted(
    set().union(*(body.model_fields for body in (ChatBody, NativeBody, InfillBody, CompletionBody, TokenizeBody)))
)
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 0.5, 2**31, -(2**31) - 1, 2**63, 10**30, 1e308, -1e308, 1e-320),
    *(float("nan"), float("inf"), "", "\0", "\ud800", "a" * 70_000, " " * 70_000, "\n\t\r", "<|im_start|>", "</s>"),
    *([], {}, [[]], [{}], [None], [[[[[[]]]]]], {"": ""}, {"type": "text"}, ["a"] * 3000, [0] * 3000, [-1], [10**9]),
    *("(a+)+$", "(((((", "root ::= root", "\\", "{{", "{% for %}", "../../a", "data:,", "http://127.0.0.1/", "%00"),
    *({"$ref": "#"}, {"type": "integer", "minimum": 9, "maximum": 1}, {"anyOf": []}, {"enum": []}, {"pattern": "("}),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container within a value, with each key of it."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def deep(chance: random.Random) -> Any:
    """Return a value within many others."""
    value: Any = chance.choice([0, "a", {}])
    for _ in range(chance.choice([3, 60, 400])):
        value = [value] if chance.random() < 0.5 else {chance.choice(["type", "items", "content", "a"]): value}
    return value


def other(value: Any, chance: random.Random) -> Any:
    """Return a hostile value, of the same type in two of three cases."""
    alike = [one for one in HOSTILE if type(one) is type(value)] if chance.random() < 0.67 else []
    return deep(chance) if chance.random() < 0.1 else copy.deepcopy(chance.choice(alike or HOSTILE))


def damage(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a copy of which one to three values are others, missing, or new."""
    found = copy.deepcopy(body)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if not found or chance.random() < 0.3:
            found[chance.choice(FIELDS)] = other(None, chance)
            continue
        where, key = chance.choice(list(places(found)))
        if chance.random() < 0.15 and isinstance(where, list):
            where[key:key] = [copy.deepcopy(where[key])] * chance.choice([1, 40])
        elif chance.random() < 0.15:
            where.pop(key, None) if isinstance(where, dict) else where.pop(key)
        else:
            where[key] = other(where[key], chance)
    return found


def damaged(text: bytes, chance: random.Random) -> bytes:
    """Return a text of which some bytes are others, are missing, or come twice."""
    at = chance.randrange(len(text))
    end = at + chance.randint(1, 8)
    middle = [b"", chance.randbytes(3), text[at:end] * 2, b"\\u0000", b'\\ud800"', b"1e999", b"[" * 2000]
    return text[:at] + chance.choice(middle) + text[end:]


class Target:
    """A server, which starts again after it has ended."""

    def __init__(self, folder: Path) -> None:
        self.errors = folder / "server.err"
        command = [sys.executable, "-m", "pylongctx", "serve", "-m", str(embedded_model()), "--port", "0", *OPTIONS]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen([*command, "--slot-save-path", str(folder)], stderr=errors)
        while not (found := re.search(r"serving at (http://\S+)", self.errors.read_text())):
            if self.process.poll() is not None:
                raise SystemExit(self.errors.read_text())
        self.http = httpx.Client(base_url=found[1], timeout=LIMIT)
        self.known = self.answer()

    def answer(self) -> str:
        """Return the greedy answer to a fixed prompt."""
        body = {"prompt": "It was the best of times,", "max_tokens": 8, "temperature": 0}
        text: str = self.http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
        return text

    def memory(self) -> int:
        """Return the MiB that the server holds."""
        return int(psutil.Process(self.process.pid).memory_info().rss >> 20)

    def send(self, seed: int, path: str, body: dict[str, Any]) -> int:
        """Send a damaged request; returns the status."""
        chance = random.Random(seed)
        content = json.dumps(damage(body, chance)).encode()
        if chance.random() < 0.2:
            content = damaged(content, chance)
        headers = {"Content-Type": "application/json"}
        if chance.random() < 0.05:
            headers |= chance.choice([{"Content-Encoding": "gzip"}, {"X-Conversation-Id": "a"}, {"Accept": "x"}])
        return self.http.post(path, content=content, headers=headers).status_code

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()


def outcome(target: Target, seed: int, path: str, body: dict[str, Any]) -> list[int | str]:
    """Return how a request ended, the server's memory, and why if it was wrong."""
    try:
        status = target.send(seed, path, body)
        if seed % CHECK_EVERY == 0 and target.answer() != target.known:
            return [1, target.memory(), "another answer to the fixed prompt"]
    except httpx.TimeoutException:
        return ["hang", 0]
    except httpx.HTTPError as reason:
        ended = target.process.poll()
        return [ended or 1, 0, f"{reason!r} {target.errors.read_text()[-300:]}"]
    if status >= 500 and status != 501:  # 501: a route that needs another option
        return [1, target.memory(), f"status {status} {target.errors.read_text()[-300:]}"]
    return [0 if status < 400 else 3, target.memory()]


def run(folder: Path, seeds: range) -> Generator[Line]:
    """Yield a line for each seed; after a server that ended or hangs, a new one continues."""
    target = Target(folder)
    try:
        for seed, (path, body) in zip(seeds, itertools.cycle(SENT), strict=False):
            line: Line = [seed, path, *outcome(target, seed, path, body)]
            yield line
            if line[2] == "hang" or target.process.poll() is not None:
                target.close()
                target = Target(folder)
    finally:
        target.close()
