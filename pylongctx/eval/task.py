"""Tasks: samples that follow from a length and a seed, the evaluation of a sample, and its score.

Ask one text many times: the beginning that prompts share is read once, and the cache goes back to its end.

A question on its own starts from an empty cache. Here a method has stored the text before it knows the question, which
is how a cached prefix is used; a method that evicts by what is read last may then answer differently.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from pylongctx.chat.conversation import THOUGHTS, open_mark, tokens_of
from pylongctx.completions.results import StopFilter
from pylongctx.engine.compress import PIECE
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.saved_state import LlamaState
from pylongctx.eval.scorers import mean
from pylongctx.llama import Llama
from pylongctx.methods import NONE, Method

Record = dict[str, Any]  # what a JSON line holds
Evaluate = Callable[["Sequence[Sample]"], "Iterator[Record]"]  # of samples, in their order
OpenLlama = Callable[[str | None], Llama]  # with the method of that name; None: with the one that is measured
Run = Callable[[Llama, "Vocabulary", "Sequence[Sample]"], "Iterator[Record]"]
NEAR = 32  # last tokens of a prompt, in which a mark of reasoning may be
CHAT_MARGIN = 4  # tokens by which a prompt may grow where a template touches it


@dataclass(frozen=True, eq=False)
class Sample:
    """One question, or one piece of text to measure.

    Attributes
    ----------
    id : str
        Its name within the task, length and seed; does not depend on which samples are run, or in which order.
    prompt : str or numpy.ndarray
        A text, which a chat template may surround, or int32 tokens that are used as they are.
    prefix : str
        What the answer begins with: follows the prompt, and the chat template.
    answers : tuple of str
        What is right; the task says whether one or all are wanted.
    max_tokens : int
        Most tokens of the answer.
    stop : tuple of str
        Strings that end the answer.
    chat : bool
        Whether a chat template may surround the prompt.
    facts : dict
        What the record holds besides.
    shared : int
        Characters, or tokens, of the prompt before its question: others about the same text begin with them too, and
        they are what is compressed. 0 if text and question cannot be separated.

    Examples
    --------
    >>> Sample("example-0", "2 + 2 =", answers=("4",), max_tokens=4).answers
    ('4',)
    """

    id: str
    prompt: str | NDArray[np.int32]
    prefix: str = ""
    answers: tuple[str, ...] = ()
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    chat: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)
    shared: int = 0


@dataclass(frozen=True)
class Chat:
    """How the chat template of a model surrounds prompts.

    Attributes
    ----------
    reasoning : bool
        Whether a reasoning model may reason before its answer. Its reasoning counts for the tokens of the answer, which
        the tasks limit, but is not graded. Before a prefix there is none.
    variables : str
        Variables of the template, a JSON object.
    """

    reasoning: bool = False
    variables: str = "{}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``apply_template``."""
        return {"enable_thinking": self.reasoning, "chat_template_kwargs": json.loads(self.variables)}

    @property
    def facts(self) -> Record:
        """The fields of a record."""
        variables = json.loads(self.variables)
        return {"chat": True, "reasoning": self.reasoning, **({"variables": variables} if variables else {})}


def chat_of(wanted: bool | Chat) -> Chat | None:
    """Return how prompts are surrounded; None: they are used as they are."""
    return wanted if isinstance(wanted, Chat) else Chat() if wanted else None


class Vocabulary(Protocol):
    """The tokenizer of a model, as the generators of samples need it."""

    @property
    def bos(self) -> list[int]:
        """The tokens that begin every text: one, or none."""

    @property
    def overhead(self) -> int:
        """Tokens that BOS and the chat template add to a prompt."""

    @property
    def reasons(self) -> bool:
        """Whether the model may reason before its answers."""

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text without BOS."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    def tokens(self, sample: Sample) -> NDArray[np.int32]:
        """Return all tokens of a prompt: BOS, template and prefix included."""


class ModelVocabulary:
    """The vocabulary of a Llama; with ``chat`` its template surrounds the prompts.

    Examples
    --------
    >>> vocabulary = ModelVocabulary(llm)
    >>> vocabulary.detokenize(vocabulary.tokenize("Who is the thief?"))
    'Who is the thief?'
    """

    def __init__(self, llm: Llama, chat: bool | Chat = False) -> None:
        self._llm = llm
        self._chat = chat_of(chat)
        self.reasons = self._chat is not None and self._chat.reasoning
        self.bos = llm.tokenize(b"")
        self._adds_space = llm.detokenize(llm.tokenize(b"x", add_bos=False)).startswith(b" ")
        self.overhead = len(self.tokens(Sample("", "x"))) - len(self.tokenize("x")) + bool(chat) * CHAT_MARGIN

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text without BOS."""
        return self._llm.tokenize(text.encode(), add_bos=False)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without the space that tokenizing put in front."""
        text = self._llm.detokenize(list(tokens)).decode("utf-8", "ignore")
        return text.removeprefix(" ") if self._adds_space else text

    def tokens(self, sample: Sample) -> NDArray[np.int32]:
        """Return all tokens of a prompt: BOS, template and prefix included."""
        if not isinstance(sample.prompt, str):
            return sample.prompt
        text, chat = sample.prompt, self._chat if sample.chat else None
        if chat is not None:
            text = self._llm.apply_template([{"role": "user", "content": text}], **chat.arguments)
            if (mark := open_mark(text)) and (sample.prefix or not chat.reasoning):
                text = f"{text.rstrip()}\n\n{THOUGHTS[mark]}\n\n"  # no reasoning, as templates write it
        return np.array(self._llm.tokenize((text + sample.prefix).encode(), special=chat is not None), np.int32)


@dataclass(frozen=True)
class Answer:
    """The answer of a model: the text up to a stop string, without reasoning; the tokens without the end token."""

    text: str
    tokens: list[int]


class AnswerText:
    """The text of an answer up to a stop string, without the reasoning that comes first.

    Parameters
    ----------
    stops : sequence of str
        Strings that end the answer, but not its reasoning.
    prompt : str
        The end of the prompt, which may open the reasoning.

    Examples
    --------
    >>> shown = AnswerText(["."], "")
    >>> shown.feed(b"<think>First. Then.</think>\\n\\nYes. No.")
    >>> shown.text, shown.stopped
    ('Yes', True)
    """

    def __init__(self, stops: Sequence[str], prompt: str) -> None:
        self.text = ""
        self._filter, self._decoder = StopFilter(list(stops)), StopFilter([])
        self._held = ""  # the beginning, until it is known what it is
        self._close: str | None = THOUGHTS.get(open_mark(prompt))  # that ends the reasoning
        self._answers = self._strips = False  # whether the answer has begun, and still only with white space

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._filter.stopped

    def feed(self, piece: bytes, final: bool = False) -> None:
        """Add a piece of the text; ``final``: the last one."""
        self._held += self._decoder.feed(piece, final)
        if not self._answers:
            self._begin(final)
        if self._answers:
            said, self._held = self._held.lstrip() if self._strips else self._held, ""
            self._strips = self._strips and not said
            self.text += self._filter.feed(said.encode(), final)

    def _begin(self, final: bool) -> None:
        """Drop the reasoning once it has ended."""
        begun = self._held.lstrip()
        if self._close is None:
            mark = next((mark for mark in THOUGHTS if begun.startswith(mark)), None)
            self._close = THOUGHTS[mark] if mark else None
            undecided = not final and any(mark.startswith(begun) for mark in THOUGHTS)
            self._answers = mark is None and not undecided
        if self._close is not None and self._close in self._held:
            self._answers = self._strips = True
            self._held = self._held.partition(self._close)[2]


class Task(ABC):
    """A kind of sample, with all its options; a frozen dataclass, so that it can be sent to another process.

    Examples
    --------
    >>> from pylongctx.eval.needle import Needle
    >>> task = Needle((0, 100), final_context_length_buffer=100)
    >>> [sample.id for sample in task.samples(ModelVocabulary(llm), length=300, seed=0)]
    ['300-0-0-0', '300-0-100-0']
    """

    headline: ClassVar[str] = "score"  # the number of ``summary`` that a table shows
    reads_once: ClassVar[bool] = False  # whether the text that several samples share is evaluated once
    caption: ClassVar[str] = "percent"  # what that number is

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in records and tables."""

    @property
    def settings(self) -> Record:
        """Settings that a record depends on in addition to its sample: how it is measured."""
        return {}

    @abstractmethod
    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return the samples of ``length`` tokens, the answer included; they follow from the arguments alone."""

    @abstractmethod
    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the numbers of all samples together."""

    def refusal(self, method: Method | None) -> str:
        """Return why a method cannot be measured and the way out, "" when it can."""
        return ""

    def n_ctx(self, vocabulary: Vocabulary, samples: Sequence[Sample], length: int) -> int:
        """Return the context window that the samples need."""
        return length

    @abstractmethod
    def opened(self, open_llama: OpenLlama, chat: bool | Chat) -> AbstractContextManager[Evaluate]:
        """Open what samples need, and yield what runs them; ``open_llama(None)`` has the cell's method."""

    def cell_text(self, records: Sequence[Record]) -> str:
        """Return the text of a table cell."""
        return f"{100 * self.summary(records)[self.headline]:.1f}"


class SingleModel(Task):
    """A task for which the model is opened once."""

    @abstractmethod
    def run(self, llm: Llama, vocabulary: Vocabulary, sample: Sample) -> Record:
        """Evaluate a sample from an empty cache; returns scores, and facts for the record."""

    def run_many(self, llm: Llama, vocabulary: Vocabulary, samples: Sequence[Sample]) -> Iterator[Record]:
        """Evaluate samples in their order; yields scores, and facts for the records."""
        for sample in samples:
            yield self.run(llm, vocabulary, sample)

    @contextmanager
    def opened(self, open_llama: OpenLlama, chat: bool | Chat) -> Iterator[Evaluate]:
        """Open the model, and yield a function that runs samples."""
        with self._opened(open_llama, chat, self.run_many) as evaluate:
            yield evaluate

    @contextmanager
    def _opened(self, open_llama: OpenLlama, chat: bool | Chat, run: Run) -> Iterator[Evaluate]:
        with open_llama(None) as llm:
            chosen, vocabulary = {"method": str(llm.method or NONE)}, ModelVocabulary(llm, chat)
            yield lambda samples: (chosen | record for record in run(llm, vocabulary, samples))


class Question(SingleModel):
    """A task whose samples are answered greedily.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Capitals(Question):
    ...     name = headline = "right"
    ...     def samples(self, vocabulary, length, seed):
    ...         return [Sample("france", "The capital of France is", answers=("Paris",), max_tokens=4)]
    ...     def scores(self, sample, answer):
    ...         return {"right": float(sample.answers[0] in answer.text)}
    >>> from pylongctx.eval.runner import Cell, run
    >>> [record["id"] for record in run(Cell("model.gguf", "full", Capitals(), 64))]
    ['france']
    """

    @abstractmethod
    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return the scores of an answer, 0 to 1, by name."""

    def run(self, llm: Llama, vocabulary: Vocabulary, sample: Sample) -> Record:
        """Return text, scores and times of the answer to a sample, from an empty cache."""
        return self._answered(llm, vocabulary.tokens(sample), sample)

    def opened_shared(
        self, open_llama: OpenLlama, chat: bool | Chat, compress: float = 1.0
    ) -> AbstractContextManager[Evaluate]:
        """Open the model, and yield a function that runs samples, the shared beginning of a text read once."""
        return self._opened(open_llama, chat, partial(self.run_shared, compress=compress))

    def run_shared(
        self, llm: Llama, vocabulary: Vocabulary, samples: Sequence[Sample], compress: float = 1.0
    ) -> Iterator[Record]:
        """Yield records of samples whose shared beginnings are read once, when those of one text come in a row."""
        reader = PrefixReader(llm, compress)
        for sample in samples:
            if reader.compresses_texts and not sample.shared:
                raise ValueError(
                    f"sample {sample.id} of {self.name!r} has no end that asks about a text, "
                    "and what comes before it would be compressed; leave compress out, or use another task or style"
                )
            tokens = vocabulary.tokens(sample)
            shortened = vocabulary.tokens(replace(sample, prompt=sample.prompt[: sample.shared], prefix=""))
            hold = partial(reader.hold_prompt, beginning_of(tokens, shortened), tokens)
            yield self._answered(llm, tokens, sample, hold)

    def _answered(
        self, llm: Llama, tokens: NDArray[np.int32], sample: Sample, hold: Callable[[], None] | None = None
    ) -> Record:
        """Return a record; ``hold`` lets the cache hold the beginning of the prompt."""
        start, before = time.perf_counter(), llm.session.n_evaluated
        if hold is not None:
            hold()
        answer, first, n_steps = greedy(llm, tokens, sample, fresh=hold is None)
        seconds = time.perf_counter() - start
        n_read = llm.session.n_evaluated - before - (n_steps - 1)
        times = {"seconds": round(seconds, 4), "ttft": round(first - start, 4), "n_generated": len(answer.tokens)}
        times |= {"tokens_read": n_read, "prompt_per_second": round(n_read / (first - start), 2)}
        if n_steps > 1:
            times["token_seconds"] = round((seconds - (first - start)) / (n_steps - 1), 6)
        return {**self._facts(tokens, sample, answer), **times, **memory(llm)}

    def _facts(self, tokens: NDArray[np.int32], sample: Sample, answer: Answer) -> Record:
        """Return the fields of a record without times and memory."""
        facts = {"n_tokens": len(tokens) + sample.max_tokens, "prompt_hash": prompt_hash(tokens)}
        facts |= {"answer": answer.text, "answers": list(sample.answers)}
        return {**facts, **sample.facts, **self.scores(sample, answer)}

    def run_many(self, llm: Llama, vocabulary: Vocabulary, samples: Sequence[Sample]) -> Iterator[Record]:
        """Yield records of samples that are answered together, where the model has several sequences.

        ``seconds`` are then those of a group of samples, divided by their number; there are no other times.
        """
        if llm.n_parallel == 1:
            yield from super().run_many(llm, vocabulary, samples)
            return
        for (n, stop), group in groupby(samples, key=lambda sample: (sample.max_tokens, sample.stop)):
            asked = list(group)
            prompts, start = [vocabulary.tokens(sample) for sample in asked], time.perf_counter()
            given = {"max_tokens": n, "stop": [] if vocabulary.reasons else list(stop), "temperature": 0.0}
            found = llm.answer_many([prompt.tolist() for prompt in prompts], **given)
            seconds = (time.perf_counter() - start) / len(asked)
            for sample, prompt, one in zip(asked, prompts, found, strict=True):
                answer = Answer(graded(llm, prompt, one.generation.tokens, stop), one.generation.tokens)
                times = {"seconds": round(seconds, 4), "n_generated": len(answer.tokens)}
                yield {**self._facts(prompt, sample, answer), **times, **memory(llm)}

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the mean of the score that counts."""
        return {self.headline: mean(record[self.headline] for record in records)}


@dataclass(frozen=True)
class FileQuestion(Question):
    """Questions of a benchmark, from the user's file.

    Attributes
    ----------
    data : str
        The file.
    tests : int or None
        The number of questions, from the first on; None: all.
    max_tokens : int or None
        Most tokens of an answer. None: as many as the benchmark allows.
    """

    data: str
    tests: int | None = None
    max_tokens: int | None = None


def prompt_hash(tokens: NDArray[np.int32]) -> str:
    """Return the beginning of the SHA-256 of tokens: equal prompts are known by it."""
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:16]


def memory(llm: Llama) -> Record:
    """Return the bytes of KV memory: held now, ever, and what a full cache of the same types holds.

    With K and V in a file, its bytes are ``kv_file_bytes``, and the index and the buffer are held. llama.cpp's own KV
    cache tells none of them.

    Examples
    --------
    >>> llm.eval(tokens[:100])
    >>> sorted(memory(llm))
    ['kv_bytes', 'kv_full_bytes', 'kv_peak_bytes']
    """
    if llm.method is None:
        return {}
    usage, offload = llm.kv_usage(), llm.offload_usage()
    found = {"kv_bytes": usage.bytes, "kv_peak_bytes": usage.peak_bytes, "kv_full_bytes": usage.full_bytes}
    if offload.file_bytes:
        found |= dict.fromkeys(("kv_bytes", "kv_peak_bytes"), offload.device_bytes)
        found["kv_file_bytes"] = offload.file_bytes
    return found


def greedy(llm: Llama, tokens: NDArray[np.int32], sample: Sample, fresh: bool = True) -> tuple[Answer, float, int]:
    """Answer; returns when the first token was there, too, and the tokens drawn: the end counts.

    The cache is empty at first; without ``fresh`` it keeps what it shares with the tokens.

    Examples
    --------
    >>> sample = Sample("example-0", "The pass key is 12345. Remember it. The pass key is", max_tokens=6)
    >>> answer, first, n_steps = greedy(llm, ModelVocabulary(llm).tokens(sample), sample)
    >>> answer.text.strip()
    '12345'
    """
    if fresh:
        llm.reset()
    model, shown, piece = llm.session.model, AnswerText(sample.stop, ending(llm, tokens)), piece_of(llm)
    output: list[int] = []
    first, n_steps = 0.0, 0
    for token in llm.generate(tokens.tolist(), temp=0.0):
        first = first or time.perf_counter()
        n_steps += 1
        if model.ends_generation(token):
            break
        output.append(token)
        shown.feed(piece(token))
        if shown.stopped or len(output) == sample.max_tokens:
            break
    if not shown.stopped:
        shown.feed(b"", final=True)
    return Answer(shown.text, output), first, n_steps


def graded(llm: Llama, prompt: NDArray[np.int32], tokens: Sequence[int], stops: Sequence[str]) -> str:
    """Return the text of the tokens that answer a prompt, up to a stop string and without reasoning."""
    shown, piece = AnswerText(stops, ending(llm, prompt)), piece_of(llm)
    for token in tokens:
        if not shown.stopped:
            shown.feed(piece(token))
    if not shown.stopped:
        shown.feed(b"", final=True)
    return shown.text


def piece_of(llm: Llama) -> Callable[[int], bytes]:
    """Return a function that returns the bytes of a token, also of special ones that are marks of reasoning."""
    model = llm.session.model
    marks = tokens_of(model, (*THOUGHTS, *THOUGHTS.values()))
    return lambda token: model.piece(token, token in marks)


def ending(llm: Llama, tokens: NDArray[np.int32]) -> str:
    """Return the text of the last tokens of a prompt, with that of special tokens."""
    return llm.detokenize(tokens[-NEAR:].tolist(), special=True).decode("utf-8", "ignore")


# ---- reuse of cached texts ----

REPLAY = PIECE + 64  # tokens of room for a compression
Tokens = NDArray[np.int32]


def by_text(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return samples in groups of one text each, in the order of their first ones.

    Examples
    --------
    >>> from pylongctx.eval.task import Sample
    >>> samples = [Sample(str(i), text + "?", shared=1) for i, text in enumerate("abab")]
    >>> [[sample.id for sample in group] for group in by_text(samples)]
    [['0', '2'], ['1', '3']]
    """
    groups: dict[object, list[Sample]] = {}
    for sample in samples:
        beginning = sample.prompt[: sample.shared]
        key = beginning if isinstance(beginning, str) else beginning.tobytes()
        groups.setdefault(key or sample.id, []).append(sample)
    return list(groups.values())


class PrefixReader:
    """Lets a model hold the shared beginning of one prompt after the other.

    Parameters
    ----------
    compress : float
        Share of the rows that ``Llama.compress`` leaves, 1 for no compression: of a beginning, or with ``snapkv`` of
        each whole prompt.

    Examples
    --------
    >>> reader = PrefixReader(llm)
    >>> reader.hold(np.array(tokens[:100], np.int32))
    >>> reader.hold(np.array(tokens[:100], np.int32))  # evaluates nothing
    """

    def __init__(self, llm: Llama, compress: float = 1.0) -> None:
        self._llm, self._compress = llm, compress
        self._keeps_state = llm.method is not None and llm.method.eviction is not None
        self._for_one_question = is_for_one_question(llm)
        self._tokens: Tokens | None = None
        self._state: LlamaState | None = None

    @property
    def compresses_texts(self) -> bool:
        """Whether beginnings are compressed, before their questions are known."""
        return self._compress < 1 and not self._for_one_question

    def hold(self, beginning: Tokens) -> None:
        """Let the cache hold a beginning, as it is when nothing else was read."""
        if self._tokens is not None and np.array_equal(self._tokens, beginning):
            if self._state is not None:  # what a question let the rule evict comes back
                self._llm.load_state(self._state)
            return
        self._llm.reset()
        self._llm.prefill(beginning.tolist())
        if self.compresses_texts:
            self._llm.compress(self._compress)
        self._tokens, self._state = beginning, self._llm.save_state() if self._keeps_state else None

    def hold_prompt(self, beginning: Tokens, prompt: Tokens) -> None:
        """Let the cache hold a beginning, or what remains of a whole prompt that is compressed for its question."""
        self.hold(beginning)
        if self._compress < 1 and self._for_one_question:
            self._llm.eval(prompt[len(beginning) :].tolist())
            self._llm.compress(self._compress)


def why_no_compression(method: Method | None) -> str:
    """Return why a method cannot compress a text that was read and the way out, "" when it can."""
    if method is not None and any(part.waits for part in method.parts):
        return ""
    return "only the rules kvzip and snapkv compress a text that was read: use --method kvzip"


def is_for_one_question(llm: Llama) -> bool:
    """Return True if ``Llama.compress`` keeps what the end of a prompt attends to, as with ``snapkv``."""
    parts = llm.method.parts if llm.method is not None else ()
    return any(part.waits and not part.replays for part in parts)


def beginning_of(prompt: Tokens, shortened: Tokens) -> Tokens:
    """Return the tokens with which a prompt and its shared part alone begin.

    Examples
    --------
    >>> beginning_of(np.array([1, 5, 6, 7], np.int32), np.array([1, 5, 9], np.int32)).tolist()
    [1, 5]
    """
    return prompt[: min(longest_prefix(prompt, shortened), len(prompt) - 1)]
