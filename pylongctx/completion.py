"""Text completion: from sampled tokens to OpenAI's response dicts."""

import codecs
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict

from pylongctx.logprobs import CompletionLogprobs, Entry, as_dict, merge

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
    logprobs: CompletionLogprobs | None
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
    n_shown : int
        Characters returned so far.
    """

    def __init__(self, stops: list[str], strip_space: bool = False) -> None:
        if not all(isinstance(stop, str) for stop in stops):
            raise TypeError("stop must be a string or a list of strings")
        self.stopped = False
        self.n_shown = 0
        self._stops = [stop for stop in stops if stop]
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held = ""

    @property
    def n_decoded(self) -> int:
        """The number of characters that were decoded, held ones included."""
        return self.n_shown + len(self._held)

    def feed(self, piece: bytes, final: bool = False) -> str:
        """Return the text that this piece makes safe to show; with ``final``, all that is left."""
        if piece and self._strip_space:
            piece, self._strip_space = piece.removeprefix(b" "), False
        self._held += self._decoder.decode(piece, final)
        found = [i for i in (self._held.find(stop) for stop in self._stops) if i >= 0]
        self.stopped = bool(found)
        n = min(found) if found else len(self._held) - (0 if final else self._n_undecided())
        shown, self._held = self._held[:n], self._held[n:]
        self.n_shown += n
        return shown

    def _n_undecided(self) -> int:
        longest = max(map(len, self._stops), default=0)
        for n in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stops):
                return n
        return 0


@dataclass
class Request:
    """One completion: where tokens come from and how they become text.

    ``echo`` returns the prompt's text and entries, ``score`` the entry of a new token at an offset (None: no
    logprobs); ``begin`` and ``end`` are called before the first token and after the last one.
    """

    model_name: str
    tokens: Iterator[int]
    piece: Callable[[int], bytes]
    ends: Callable[[int], bool]
    n_prompt: int
    max_tokens: int
    filter: StopFilter
    offset: int = 0
    echo: Callable[[], tuple[str, list[Entry]]] | None = None
    score: Callable[[int, int], Entry] | None = None
    begin: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None


class Run:
    """The course of one completion: what was generated, what of it may be shown."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.n_tokens = 0
        self.reason: FinishReason = "stop"  # also when a stopping criterion ends the tokens
        self._waiting: list[Entry] = []  # entries of tokens whose text is held back

    def parts(self) -> Iterator[tuple[str, list[Entry]]]:
        """Yield text, and the entries of the tokens that start in it."""
        request = self.request
        if request.echo:
            yield request.echo()
        request.begin()
        if not request.max_tokens:
            self.reason = "length"
            return
        for token in request.tokens:
            if request.ends(token):
                break
            self.n_tokens += 1
            yield self._feed(token)
            if request.filter.stopped:
                return
            if self.n_tokens >= request.max_tokens:
                self.reason = "length"
                break
        yield request.filter.feed(b"", final=True), self._waiting

    def usage(self) -> CompletionUsage:
        """Return the token counts so far."""
        n_prompt = self.request.n_prompt
        total = n_prompt + self.n_tokens
        return {"prompt_tokens": n_prompt, "completion_tokens": self.n_tokens, "total_tokens": total}

    def _feed(self, token: int) -> tuple[str, list[Entry]]:
        request, known = self.request, self.request.filter
        if request.score:
            self._waiting.append(request.score(token, request.offset + known.n_decoded))
        text = known.feed(request.piece(token))
        end = request.offset + known.n_shown
        ready = [entry for entry in self._waiting if entry.offset < end]
        del self._waiting[: len(ready)]
        return text, ready


def stream(request: Request) -> Iterator[Completion]:
    """Yield one chunk per piece of text, then a chunk with the finish reason and the usage."""
    completion_id, created = f"cmpl-{uuid.uuid4()}", int(time.time())

    def chunk(text: str, logprobs: CompletionLogprobs | None, finish_reason: FinishReason | None) -> Completion:
        choice: CompletionChoice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {
            "id": completion_id,
            "object": "text_completion",
            "created": created,
            "model": request.model_name,
            "choices": [choice],
        }

    run = Run(request)
    for text, entries in run.parts():
        if text or entries:
            yield chunk(text, as_dict(entries) if request.score else None, None)
    request.end()
    last = chunk("", None, run.reason)
    last["usage"] = run.usage()
    yield last


def collect(request: Request) -> Completion:
    """Return the whole completion."""
    parts = list(stream(request))
    whole = parts[-1]
    choice = whole["choices"][0]
    choice["text"] = "".join(part["choices"][0]["text"] for part in parts)
    if request.score:
        choice["logprobs"] = merge(part["choices"][0]["logprobs"] for part in parts)
    return whole
