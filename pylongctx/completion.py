"""Text completion: from sampled tokens to OpenAI's response dicts."""

import codecs
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict

FinishReason = Literal["stop", "length"]


class CompletionUsage(TypedDict):
    """Token counts of one completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(TypedDict):
    """The text of one completion, or of one chunk."""

    text: str
    index: int
    logprobs: None
    finish_reason: FinishReason | None


class _Answer(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]


class Completion(_Answer, total=False):
    """A completion, or a chunk of a stream; every chunk but the last has no ``usage``."""

    usage: CompletionUsage


class StopFilter:
    """Turn pieces of UTF-8 into text, up to the first stop string.

    Text that may be the beginning of a stop string is held back until it is clear; bytes of an unfinished
    character wait for the rest. The cost is linear in the text.

    Attributes
    ----------
    stopped : bool
        Whether a stop string was found.
    """

    def __init__(self, stops: list[str], strip_space: bool = False) -> None:
        if not all(isinstance(stop, str) for stop in stops):
            raise TypeError("stop must be a string or a list of strings")
        self.stopped = False
        self._stops = [stop for stop in stops if stop]
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held = ""

    def feed(self, piece: bytes, final: bool = False) -> str:
        """Return the text that this piece makes safe to show; with ``final``, all that is left."""
        if piece and self._strip_space:
            piece, self._strip_space = piece.removeprefix(b" "), False
        self._held += self._decoder.decode(piece, final)
        found = [i for i in (self._held.find(stop) for stop in self._stops) if i >= 0]
        self.stopped = bool(found)
        n = min(found) if found else len(self._held) - (0 if final else self._n_undecided())
        shown, self._held = self._held[:n], self._held[n:]
        return shown

    def _n_undecided(self) -> int:
        longest = max(map(len, self._stops), default=0)
        for n in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stops):
                return n
        return 0


@dataclass
class Request:
    """One completion: where tokens come from and how they become text."""

    model_name: str
    tokens: Iterator[int]
    piece: Callable[[int], bytes]
    ends: Callable[[int], bool]
    n_prompt: int
    max_tokens: int
    filter: StopFilter
    echo: str


def stream(request: Request) -> Iterator[Completion]:
    """Yield one chunk per piece of text, then a chunk with the finish reason and the usage."""
    completion_id, created = f"cmpl-{uuid.uuid4()}", int(time.time())

    def chunk(text: str, finish_reason: FinishReason | None) -> Completion:
        choice: CompletionChoice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason}
        return {
            "id": completion_id,
            "object": "text_completion",
            "created": created,
            "model": request.model_name,
            "choices": [choice],
        }

    if request.echo:
        yield chunk(request.echo, None)
    n_tokens = 0
    reason: FinishReason = "stop"  # also when a stopping criterion ends the tokens
    for token in request.tokens:
        if request.ends(token):
            break
        n_tokens += 1
        if text := request.filter.feed(request.piece(token)):
            yield chunk(text, None)
        if request.filter.stopped:
            break
        if n_tokens >= request.max_tokens:
            reason = "length"
            break
    if not request.filter.stopped and (text := request.filter.feed(b"", final=True)):
        yield chunk(text, None)
    last = chunk("", reason)
    last["usage"] = {
        "prompt_tokens": request.n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": request.n_prompt + n_tokens,
    }
    yield last


def collect(chunks: Iterator[Completion]) -> Completion:
    """Return the whole completion."""
    parts = list(chunks)
    whole = parts[-1]
    whole["choices"][0]["text"] = "".join(part["choices"][0]["text"] for part in parts)
    return whole
