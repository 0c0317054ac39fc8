"""Perplexity of texts in four ways, in memory that does not grow with vocabulary times tokens.

``llama.cpp``: chunks as long as the context, the second half of each is scored, as llama-perplexity does it.
``sliding``: windows that advance by a stride, of which the last ``stride`` tokens are scored (Press et al., arXiv
2108.12409; LongHeads and SelfExtend take 256). ``incremental``: one pass, every token given all before it, with a curve
by position. ``last``: the ends of passages, the same tokens for every length. Passages begin with BOS, windows do not.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pylongctx.eval.task import Record, Sample, SingleModel, Vocabulary, memory
from pylongctx.files import read_file, without_note
from pylongctx.llama import Llama

MODES = ("llama.cpp", "sliding", "incremental", "last")


def token_nll(llm: Llama, tokens: Sequence[int] | NDArray[np.int32], first: int) -> NDArray[np.float64]:
    """Return the negative log-likelihoods of ``tokens[first + 1:]``, each given all tokens before it.

    They are evaluated from an empty cache.

    Examples
    --------
    >>> token_nll(llm, tokens[:64], first=31).shape
    (32,)
    """
    parts = [nll_of(llm, logits, following) for logits, following in scored_rows(llm, tokens, first)]
    return np.concatenate(parts)


def scored_rows(
    llm: Llama, tokens: Sequence[int] | NDArray[np.int32], first: int
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]:
    """Evaluate tokens from an empty cache; yield logits from token ``first`` on, and the tokens that follow them.

    Examples
    --------
    >>> sum(len(following) for logits, following in scored_rows(llm, tokens[:64], first=31))
    32
    """
    ids = np.asarray(tokens, np.int32)
    llm.reset()
    if first:
        llm.eval(ids[:first].tolist())
    done = first + 1
    for logits in llm.eval_rows(ids[first:-1].tolist()):
        yield logits, ids[done : done + len(logits)]
        done += len(logits)


def nll_of(llm: Llama, logits: NDArray[np.float32], following: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the negative log-likelihoods of the tokens that follow rows of logits.

    Examples
    --------
    >>> rows = np.zeros((2, 4), np.float32)
    >>> nll_of(llm, rows, np.array([0, 3])).round(3)
    array([1.386, 1.386])
    """
    logprobs = llm.logits_to_logprobs(logits)
    return -logprobs[np.arange(len(logits)), following].astype(np.float64)


def mean_nll(llm: Llama, tokens: Sequence[int], last: int) -> float:
    """Return the mean negative log-likelihood of the last ``last`` tokens, each given all tokens before it.

    The window is evaluated from an empty cache.

    Raises
    ------
    ValueError
        When ``last`` is not from 1 to ``len(tokens) - 1``.

    Examples
    --------
    >>> round(math.exp(mean_nll(llm, tokens[:64], last=32))) == round(perplexity(llm, tokens[:64], last=32))
    True
    """
    if not 1 <= last < len(tokens):
        raise ValueError(f"last must be from 1 to {len(tokens) - 1}, not {last}")
    return float(token_nll(llm, tokens, len(tokens) - last - 1).mean())


def perplexity(llm: Llama, tokens: Sequence[int], last: int) -> float:
    """Return ``exp(mean_nll(llm, tokens, last))``.

    Examples
    --------
    >>> perplexity(llm, tokens[:128], last=32) < 100
    True
    """
    return math.exp(mean_nll(llm, tokens, last))


# ---- pieces of a text ----


def read_text(path: str) -> str:
    """Return a file's text without a last newline, as llama.cpp's ``-f`` reads it.

    Examples
    --------
    >>> len(read_text("book.txt")) > 1000
    True
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no text file {path!r}")
    return without_note(read_file(path)).removesuffix("\n")


def read_texts(files: str | Sequence[str]) -> dict[str, str]:
    """Return the texts of one or several files by the names of the files.

    Examples
    --------
    >>> list(read_texts("book.txt"))
    ['book.txt']
    """
    paths = (files,) if isinstance(files, str) else files
    found = {Path(path).name: read_text(path) for path in paths}
    if len(found) < len(paths) or not found:
        raise ValueError(f"texts need files with different names, not {', '.join(paths) or 'none'}")
    return found


def chunks(vocabulary: Vocabulary, text: str, n: int) -> list[NDArray[np.int32]]:
    """Return llama-perplexity's chunks of ``n`` tokens: one after the other, the first token replaced by BOS.

    Examples
    --------
    >>> from pylongctx.eval.task import ModelVocabulary
    >>> [len(part) for part in chunks(ModelVocabulary(llm), read_text("book.txt"), 100)][:3]
    [100, 100, 100]
    """
    tokens = np.array([*vocabulary.bos, *vocabulary.tokenize(text)], np.int32)
    if len(tokens) < 2 * n:
        raise ValueError(f"the text has {len(tokens)} tokens; a context of {n} needs at least {2 * n}")
    parts = tokens[: len(tokens) // n * n].reshape(-1, n).copy()
    parts[:, : len(vocabulary.bos)] = vocabulary.bos
    return list(parts)


def windows(tokens: NDArray[np.int32], n: int, stride: int) -> list[NDArray[np.int32]]:
    """Return all windows of ``n`` tokens that begin at multiples of ``stride``.

    Examples
    --------
    >>> [window.tolist() for window in windows(np.arange(6), n=4, stride=2)]
    [[0, 1, 2, 3], [2, 3, 4, 5]]
    """
    if len(tokens) < n:
        raise ValueError(f"the text has {len(tokens)} tokens, a window has {n}")
    return list(np.lib.stride_tricks.sliding_window_view(tokens, n)[::stride])


def passages(tokens: NDArray[np.int32], n: int, count: int, at_end: bool) -> list[NDArray[np.int32]]:
    """Return ``count`` passages of ``n`` tokens, evenly spread.

    Where they begin does not depend on ``n``, or with ``at_end`` where they end, as far as the text allows.

    Examples
    --------
    >>> [passage.tolist() for passage in passages(np.arange(12), n=3, count=2, at_end=True)]
    [[3, 4, 5], [9, 10, 11]]
    """
    if len(tokens) < n:
        raise ValueError(f"the text has {len(tokens)} tokens, a passage has {n}")
    shares = np.arange(count) / count * len(tokens)
    starts = shares + len(tokens) / count - n if at_end else shares
    return [tokens[start : start + n].copy() for start in np.clip(starts, 0, len(tokens) - n).astype(int)]


def pieces_of(
    files: str | Sequence[str], named: str, cut: Callable[[str], Sequence[NDArray[np.int32]]]
) -> list[Sample]:
    """Return a sample for each piece that ``cut`` makes of one or several texts; ids begin with ``named``.

    Examples
    --------
    >>> samples = pieces_of("book.txt", "example", lambda text: [np.arange(4, dtype=np.int32)])
    >>> samples[0].id, dict(samples[0].facts)
    ('example-0', {'index': 0, 'text': 'book.txt'})
    """
    texts = read_texts(files)
    return [
        Sample(f"{named}-{name}-{i}" if len(texts) > 1 else f"{named}-{i}", piece, facts={"index": i, "text": name})
        for name, text in texts.items()
        for i, piece in enumerate(cut(text))
    ]


# ---- the task ----


@dataclass(frozen=True)
class Perplexity(SingleModel):
    """Perplexity of one or several texts.

    Attributes
    ----------
    file : str or tuple of str
        UTF-8 texts.
    mode : str
        One of ``MODES``.
    chunks : int or None
        The number of chunks, windows or passages of each text, from the first on. None: all; one with
        ``incremental``, 4 with ``last``.
    stride : int
        Tokens by which windows advance, that are scored at the ends of passages, that a point of the curve stands for.

    Examples
    --------
    >>> from pylongctx.eval.runner import Cell, run
    >>> task = Perplexity("book.txt", mode="last", chunks=1, stride=64)
    >>> records = list(run(Cell("model.gguf", "selfextend", task, length=300)))
    >>> records[0]["n_scored"], 1 < task.summary(records)["perplexity"] < 100
    (64, True)
    """

    headline: ClassVar[str] = "perplexity"
    file: str | tuple[str, ...]
    mode: str = "llama.cpp"
    chunks: int | None = None
    stride: int = 256
    name: str = field(default="perplexity", init=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}; available: {', '.join(MODES)}")
        if self.stride < 1 or (self.chunks is not None and self.chunks < 1):
            raise ValueError("stride and chunks must be at least 1")

    @property
    def settings(self) -> Record:
        """The way to measure, and the tokens that it scores or averages."""
        return {"mode": self.mode} | ({} if self.mode == "llama.cpp" else {"stride": self.stride})

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return the pieces of the texts; the seed changes nothing."""
        if length < (4 if self.mode == "llama.cpp" else self.stride + 1 if self.mode != "incremental" else 2):
            raise ValueError(f"length {length} is too short for mode {self.mode} with a stride of {self.stride}")
        named = f"{self.mode}-{length}"
        return pieces_of(self.file, named, lambda text: self._pieces(vocabulary, text, length))

    def _pieces(self, vocabulary: Vocabulary, text: str, n: int) -> list[NDArray[np.int32]]:
        if self.mode == "llama.cpp":
            return chunks(vocabulary, text, n)[: self.chunks]
        tokens = np.array(vocabulary.tokenize(text), np.int32)
        if self.mode == "sliding":
            return windows(tokens, n, self.stride)[: self.chunks]
        at_end = self.mode == "last"
        found = passages(tokens, n, self.chunks or (4 if at_end else 1), at_end)
        for passage in found:
            passage[: len(vocabulary.bos)] = vocabulary.bos
        return found

    def first(self, sample: Sample) -> int:
        """Return the first token whose successor is scored."""
        n = len(sample.prompt)
        if self.mode == "llama.cpp":
            return n // 2
        whole = self.mode == "incremental" or (self.mode == "sliding" and sample.facts["index"] == 0)
        return 0 if whole else n - self.stride - 1

    def run(self, llm: Llama, vocabulary: Vocabulary, sample: Sample) -> Record:
        """Return the sums over the scored tokens, and with ``incremental`` the curve."""
        start = time.perf_counter()
        values = token_nll(llm, vocabulary.tokens(sample), self.first(sample))
        record = {
            "seconds": round(time.perf_counter() - start, 4),
            **self.settings,
            **sample.facts,
            "n_tokens": len(sample.prompt),
            "n_scored": len(values),
        }
        record |= {"nll": float(values.sum()), "nll2": float((values**2).sum()), **memory(llm)}
        if self.mode == "incremental":
            bins = np.split(values, range(self.stride, len(values), self.stride))
            record["curve"] = [[float(part.sum()), len(part)] for part in bins]
        return record

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return ``perplexity`` and ``error``, llama-perplexity's numbers of all scored tokens."""
        n = sum(record["n_scored"] for record in records)
        if not n:
            return {"perplexity": math.nan, "error": math.nan}
        mean, square = (sum(record[key] for record in records) / n for key in ("nll", "nll2"))
        value = math.exp(mean) if mean < 700 else math.inf
        variance = (square - mean**2) / (n - 1) if n > 1 else 0.0
        return {"perplexity": value, "error": value * math.sqrt(max(0.0, variance)), "n_scored": n}

    def cell_text(self, records: Sequence[Record]) -> str:
        """Return the text of a table cell."""
        found = self.summary(records)
        return f"{found['perplexity']:.4g} \u00b1 {found['error']:.2g}"


def curve(records: Sequence[Record], stride: int) -> tuple[list[int], list[float]]:
    """Return positions and perplexities there of ``incremental`` records; a point is the middle of its tokens.

    Examples
    --------
    >>> curve([{"curve": [[256 * math.log(8), 256], [256 * math.log(2), 256]]}], stride=256)
    ([128, 384], [7.999999999999998, 2.0])
    """
    longest = max(len(record["curve"]) for record in records)
    points = [[record["curve"][i] for record in records if i < len(record["curve"])] for i in range(longest)]
    values = [math.exp(sum(nll for nll, _ in point) / sum(n for _, n in point)) for point in points]
    return [i * stride + stride // 2 for i in range(longest)], values
