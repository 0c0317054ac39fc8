"""Text completion: from sampled tokens to OpenAI's response dicts."""

import codecs
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypedDict

from pylongctx.completions.logprobs import CompletionLogprobs, Scorer, TokenEntry, as_dict, merge
from pylongctx.engine.job import Job, Row
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.source import TokenSource

FinishReason = Literal["stop", "length"]


class _Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionUsage(_Usage, total=False):
    """Token counts of one completion, with ``dropped_tokens`` and ``dropped_turns`` in the details, if any."""

    prompt_tokens_details: dict[str, int]


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

    Attributes
    ----------
    stopped : bool
        Whether a stop string was found.
    word : str
        The stop string that was found.
    n_shown : int
        Characters returned so far.
    """

    def __init__(self, stops: list[str], strip_space: bool = False) -> None:
        if not all(isinstance(stop, str) for stop in stops):
            raise TypeError("stop must be a string or a list of strings")
        self.stopped = False
        self.word = ""
        self.n_shown = 0
        self._stops = [stop for stop in stops if stop]
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held = ""

    @property
    def n_decoded(self) -> int:
        """The number of decoded characters, including those held back."""
        return self.n_shown + len(self._held)

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

    Parameters
    ----------
    source : TokenSource
        Where the tokens come from.
    job : Job
        The request of the answer.
    filter : StopFilter
        Decodes pieces into text, up to a stop string.
    piece : callable
        Returns the bytes of a token.
    scorer : Scorer or None
        Creates entries of log-probabilities.
    prompt : str
        The text before the answer; offsets count from its beginning.
    echo : bool
        Whether the prompt comes before the answer, with entries of its tokens.
    special : bool
        Whether the prompt was a text whose special tokens were parsed.
    params : SamplingParams or None
        The sampling parameters, for reports.

    Attributes
    ----------
    tokens : list of int
        The tokens of the answer so far.
    ended : bool
        Whether the model ended it.
    reason : str
        Why it ended.
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
        job.every_row |= echo and scorer is not None

    @property
    def n_tokens(self) -> int:
        """The number of tokens of the answer so far."""
        return len(self.tokens)

    @property
    def word(self) -> str:
        """The stop string that ended the answer; empty: none."""
        return self._filter.word

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
