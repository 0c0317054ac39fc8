"""Completions as they are generated: their text and log-probabilities in OpenAI's dicts, one or several at once."""

import codecs
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, in_buffer, lib, out_buffer
from pylongctx.engine.job import Job, Row
from pylongctx.engine.model import Model
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.sampler import check_logits
from pylongctx.engine.solo import Solo
from pylongctx.engine.source import TokenSource

FinishReason = Literal["stop", "length"]
QUEUED = 2  # prompts queued per sequence; a queued prompt may be a prefix of the next one


class CompletionLogprobs(TypedDict):
    """Four lists with one entry per token."""

    tokens: list[str]
    text_offset: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class TokenEntry(NamedTuple):
    """One token: its bytes, its offset in the returned text, its log-probability, the most likely tokens; ids."""

    piece: bytes
    offset: int
    logprob: float | None
    top: list[tuple[bytes, float]] | None
    token: int = -1
    top_tokens: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The token's text; for a part of a character its bytes in OpenAI's form: ``bytes:\\xe6``."""
        return next(_names(self.token, self.piece))

    @property
    def top_texts(self) -> dict[str, float] | None:
        """The most likely tokens and this one, each under a unique name."""
        if self.top is None or self.logprob is None:
            return None
        names, taken, values = {self.token: self.text}, {self.text}, dict[int, float]()
        for token, (piece, value) in zip(self.top_tokens, self.top, strict=True):
            values[token] = value
            if token not in names:
                names[token] = next(name for name in _names(token, piece) if name not in taken)
                taken.add(names[token])
        return {names[token]: value for token, value in (values | {self.token: self.logprob}).items()}


def _names(token: int, piece: bytes) -> Iterator[str]:
    """Yield candidate names of a token, since tokens may share a text, like a byte and a letter, or have none."""
    with suppress(UnicodeDecodeError):
        yield piece.decode()
    if piece:
        yield "bytes:" + "".join(chr(b) if 32 <= b < 127 and b != ord("\\") else f"\\x{b:02x}" for b in piece)
    yield f"token_id:{token}"


def as_dict(entries: Iterable[TokenEntry]) -> CompletionLogprobs:
    """Return OpenAI's dict of lists.

    Examples
    --------
    >>> as_dict([TokenEntry(b"\\xe6", 0, -0.5, [(b"\\xe6", -0.5), (b" man", -1.5)], 7, (7, 9))])["top_logprobs"]
    [{'bytes:\\\\xe6': -0.5, ' man': -1.5}]
    """
    entries = list(entries)
    return {
        "tokens": [entry.text for entry in entries],
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [entry.top_texts for entry in entries],
    }


def merge(parts: Iterable[CompletionLogprobs | None]) -> CompletionLogprobs:
    """Concatenate the lists of several chunks.

    Examples
    --------
    >>> part = as_dict([TokenEntry(b" thief", 0, -0.5, None)])
    >>> merge([part, None, part])["tokens"]
    [' thief', ' thief']
    """
    whole = as_dict([])
    for part in parts:
        for name, values in (part or {}).items():
            whole[name] += values  # type: ignore[literal-required]
    return whole


class Scorer:
    """Creates entries from tokens and logits."""

    def __init__(self, model: Model, n_top: int, piece: Callable[[int], bytes] | None = None) -> None:
        self._model = model
        self._n_top = min(n_top, int(model.info.n_vocab))
        self._piece = piece or model.piece

    def entry(self, token: int, row: NDArray[np.float32], offset: int) -> TokenEntry:
        """Return the entry of a token that follows the logits float32 [n_vocab]."""
        own, top, ids = self._score(np.array([token], np.int32), row[np.newaxis])
        return TokenEntry(self._piece(token), offset, own[0], top[0], token, tuple(ids[0]))

    def prompt(
        self, parts: Iterable[NDArray[np.float32]], tokens: NDArray[np.int32], text: str, special: bool
    ) -> list[TokenEntry]:
        """Return the entries of a prompt's tokens; ``parts``: the logits after them, step by step.

        For a text (``special``) the added BOS is left out; token ids have one entry each, as clients count them.
        Memory does not grow with vocabulary times tokens: only the entry of every row of logits is kept.
        """
        own: list[float | None] = [None]  # the first token has no predecessor
        top: list[list[tuple[bytes, float]] | None] = [None]
        ids: list[list[int]] = [[]]
        for rows in parts:
            following = tokens[len(own) : len(own) + len(rows)]
            values, likeliest, of_likeliest = self._score(following, rows[: len(following)])
            own += values
            top += likeliest
            ids += of_likeliest
        first = int(special and tokens[0] == self._model.info.token_bos)
        read = tokens[first:].tolist()
        pieces = [self._model.piece(token, special) for token in read]
        places = zip(
            pieces, _offsets(pieces, text), own[first:], top[first:], read, map(tuple, ids[first:]), strict=True
        )
        return [TokenEntry(*place) for place in places]

    def _score(
        self, tokens: NDArray[np.int32], rows: NDArray[np.float32]
    ) -> tuple[list[float], list[list[tuple[bytes, float]]], list[list[int]]]:
        """Return the log-probability of each token after its row of logits, and the most likely tokens of each row."""
        n, n_vocab = rows.shape
        own, top = np.empty(n, np.float32), np.empty((n, self._n_top), np.float32)
        ids = np.empty((n, self._n_top), np.int32)
        status = lib.lctx_logprobs(
            in_buffer("logits", rows, np.float32),
            n,
            n_vocab,
            in_buffer("tokens", tokens, np.int32),
            out_buffer("own", own, np.float32),
            self._n_top,
            out_buffer("ids", ids, np.int32),
            out_buffer("top", top, np.float32),
        )
        if status != lib.LCTX_OK:
            check_logits(rows)
            raise error(status, "the log-probabilities cannot be computed")
        likeliest = [
            [(self._piece(token), value) for token, value in zip(*pair, strict=True)]
            for pair in zip(ids.tolist(), top.tolist(), strict=True)
        ]
        return own.tolist(), likeliest, ids.tolist()


def _offsets(pieces: Sequence[bytes], text: str) -> Iterator[int]:
    """Yield the offset of each piece in ``text``, which may lack the leading space added by the tokenizer."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    lengths = [len(decoder.decode(piece)) for piece in pieces]
    offset = min(0, len(text) - sum(lengths))
    for length in lengths:
        yield max(0, offset)
        offset += length


class _Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionUsage(_Usage, total=False):
    """Token counts, with ``dropped_tokens`` and ``dropped_turns``, and ``reasoning_tokens``, in the details, if any."""

    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


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
    """Decodes pieces of UTF-8 into text, up to the first stop string.

    Text that may be the beginning of a stop string is held back until that is decided; bytes of an unfinished
    character wait for the rest. The cost is linear in the text.
    """

    def __init__(self, stops: list[str], strip_space: bool = False) -> None:
        if not all(isinstance(stop, str) for stop in stops):
            raise TypeError("stop must be a string or a list of strings")
        self.stopped = False
        self.word = ""  # the stop string that was found
        self.n_shown = 0  # characters returned so far
        self._stops = [stop for stop in stops if stop]
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held = ""

    @property
    def n_held(self) -> int:
        """The number of characters held back, or after a stop string was found, from it on."""
        return len(self._held)

    @property
    def n_decoded(self) -> int:
        """The number of decoded characters, including those held back."""
        return self.n_shown + self.n_held

    def feed(self, piece: bytes, final: bool = False) -> str:
        """Return the text that can be shown after this piece; with ``final``, all remaining text."""
        if piece and self._strip_space:
            piece, self._strip_space = piece.removeprefix(b" "), False
        self._held += self._decoder.decode(piece, final)
        found = [(i, stop) for stop in self._stops if (i := self._held.find(stop)) >= 0]
        self.stopped = bool(found)
        self.word = min(found)[1] if found else ""
        n = min(found)[0] if found else len(self._held) - (0 if final else self._n_undecided())
        shown, self._held = self._held[:n], self._held[n:]
        self.n_shown += n
        return shown

    def _n_undecided(self) -> int:
        longest = max(map(len, self._stops), default=0)
        for n in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stops):
                return n
        return 0


class Generation:
    """A running answer: its job, and the conversion of its tokens to text.

    ``piece`` returns the bytes of a token. Offsets count from the beginning of ``prompt``, whose special tokens were
    parsed if ``special``; with ``echo`` it comes before the answer, with entries of its tokens. ``params`` are for
    reports.
    """

    def __init__(
        self,
        source: TokenSource,
        job: Job,
        filter: StopFilter,
        piece: Callable[[int], bytes],
        scorer: Scorer | None = None,
        prompt: str = "",
        echo: bool = False,
        special: bool = True,
        params: SamplingParams | None = None,
    ) -> None:
        self.source = source
        self.params = params
        self.job = job
        self.scorer = scorer
        self.tokens: list[int] = []
        self.ended = False
        self.reason: FinishReason = "stop"  # also when a stopping criterion ends the answer
        self._filter = filter
        self._piece = piece
        self._prompt = prompt
        self._echo = echo
        self._special = special
        self._waiting: list[TokenEntry] = []  # entries of tokens whose text is held back
        self._word = ""
        job.every_row |= echo and scorer is not None

    @property
    def n_tokens(self) -> int:
        """The number of tokens of the answer so far."""
        return len(self.tokens)

    @property
    def word(self) -> str:
        """The stop string that ended the answer; empty: none."""
        return self._word or self._filter.word

    def end_at(self, word: str) -> None:
        """End the answer at a stop string that its reader found; the reader takes no more parts."""
        self._word = word

    def parts(self) -> Iterator[tuple[str, list[TokenEntry]]]:
        """Yield pieces of text with the entries of the tokens that start in them."""
        if self._echo:
            yield self._prompt, self._prompt_entries()
        if self.job.limit == 0:
            self.reason = "length"
            return
        for token, row in self.source.drawn(self.job):
            if self.job.ends(self.source.model, token):
                self.ended = True
                break
            self.tokens.append(token)
            yield self._feed(token, row)
            if self._filter.stopped:
                return
            if self.n_tokens == self.job.limit:
                self.reason = "length"
                break
        if self.job.full:
            self.reason = "length"
        yield self._filter.feed(b"", final=True), self._waiting

    def finish(self) -> None:
        """Tell the source that no more tokens are needed."""
        self.job.stop_word = self.word
        self.source.finish(self.job)

    def usage(self) -> CompletionUsage:
        """Return the token counts so far."""
        n_prompt = len(self.job.tokens)
        total = n_prompt + self.n_tokens
        usage: CompletionUsage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": self.n_tokens,
            "total_tokens": total,
        }
        if dropped := self.job.dropped():
            usage["prompt_tokens_details"] = dropped
        return usage

    def _prompt_entries(self) -> list[TokenEntry]:
        if self.scorer is None:
            return []
        rows = self.source.rows(self.job)
        return self.scorer.prompt(rows, self.job.tokens, self._prompt, self._special)

    def _feed(self, token: int, row: Row | None) -> tuple[str, list[TokenEntry]]:
        known, before = self._filter, len(self._prompt)
        if self.scorer is not None and row is not None:
            self._waiting.append(self.scorer.entry(token, row, before + known.n_decoded))
        text = known.feed(self._piece(token))
        end = before + known.n_shown
        ready = [entry for entry in self._waiting if entry.offset < end]
        del self._waiting[: len(ready)]
        return text, ready


def stream(
    generation: Generation, model_name: str, parts: Iterable[tuple[str, list[TokenEntry]]] | None = None
) -> Iterator[Completion]:
    """Yield one chunk per piece of text, then a chunk with the finish reason and the usage.

    ``parts``: those of the generation, if they were already taken.
    """
    completion_id, created = f"cmpl-{uuid.uuid4()}", int(time.time())

    def chunk(text: str, logprobs: CompletionLogprobs | None, finish_reason: FinishReason | None) -> Completion:
        choice: CompletionChoice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {
            "id": completion_id,
            "object": "text_completion",
            "created": created,
            "model": model_name,
            "choices": [choice],
        }

    for text, entries in generation.parts() if parts is None else parts:
        if text or entries:
            yield chunk(text, as_dict(entries) if generation.scorer else None, None)
    generation.finish()
    last = chunk("", None, generation.reason)
    last["usage"] = generation.usage()
    yield last


def choices_of(answers: Sequence[Completion]) -> Completion:
    """Return one completion whose choices are the answers to several prompts, in order."""
    whole = answers[0].copy()
    whole["choices"] = [answer["choices"][0] for answer in answers]
    for i, choice in enumerate(whole["choices"]):
        choice["index"] = i
    n_prompt, n_completion = (
        sum(answer["usage"][name] for answer in answers) for name in ("prompt_tokens", "completion_tokens")
    )
    whole["usage"] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
    }
    return whole


def collect(chunks: Iterator[Completion], with_logprobs: bool) -> Completion:
    """Combine the chunks of a stream into one completion."""
    parts = list(chunks)
    whole = parts[-1]
    choice = whole["choices"][0]
    choice["text"] = "".join(part["choices"][0]["text"] for part in parts)
    if with_logprobs:
        choice["logprobs"] = merge(part["choices"][0]["logprobs"] for part in parts)
    return whole


Parts = list[tuple[str, list[TokenEntry]]]


class Answered(NamedTuple):
    """A completion and its generation, which has the tokens."""

    completion: Completion
    generation: Generation


class RunningAnswer:
    """A running answer among others; the job of its generation must have been started."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.parts: Parts = []
        self._taken = generation.parts()

    def take(self) -> bool:
        """Collect the available tokens of the answer; returns whether it is complete."""
        job = self.generation.job
        while not job.results.empty() or job.limit == 0:
            part = next(self._taken, None)
            if part is None:
                return True
            self.parts.append(part)
        return False

    def answer(self, name: str) -> Answered:
        """Return the completion, with the model's name."""
        chunks = stream(self.generation, name, self.parts)
        return Answered(collect(chunks, self.generation.scorer is not None), self.generation)


def complete_together(
    solo: Solo, generations: Iterable[Generation], name: str, done: Callable[[int], None]
) -> list[Answered]:
    """Return the answers to prompts, in order; the lock of ``solo``, on whose sequences they run, is held.

    A generation is taken from the iterable shortly before a sequence becomes free for it. ``done`` is called after each
    answer with the number of answered prompts.
    """
    waiting, n_taken = iter(generations), 0
    running: dict[int, RunningAnswer] = {}
    found: dict[int, Answered] = {}
    solo.release()
    solo.session.context.abort = False
    try:
        while True:
            for generation in _next(waiting, QUEUED * len(solo.engine.slots) - len(running)):
                solo.start(generation.job)
                running[n_taken] = RunningAnswer(generation)
                n_taken += 1
            if not running:
                return [found[i] for i in range(n_taken)]
            complete = [i for i, one in running.items() if one.take()]
            for i in complete:
                found[i] = running.pop(i).answer(name)
                with solo.session.lock.calling():
                    done(len(found))
            if not complete:
                solo.step()
    finally:
        solo.release()


def _next(generations: Iterator[Generation], n: int) -> list[Generation]:
    """Return the next generations, at most ``n``."""
    return [generation for _, generation in zip(range(n), generations, strict=False)]
