"""Perplexity of texts in four ways, in memory that does not grow with vocabulary times tokens.

``llama.cpp``: chunks as long as the context, the second half of each is scored, as llama-perplexity does it.
``sliding``: windows that advance by a stride, of which the last ``stride`` tokens are scored (Press et al., arXiv
2108.12409; LongHeads and SelfExtend take 256). ``incremental``: one pass, every token given all before it, with a curve
by position. ``last``: the ends of passages, the same tokens for every length. Passages begin with BOS, windows do not.

Kullback-Leibler divergence of a method from another, token by token: llama.cpp's numbers, without its file.

Both run side by side on the chunks of llama-perplexity, so no log-probabilities are stored or rounded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pylongctx.eval.task import (
    Chat,
    Evaluate,
    ModelVocabulary,
    OpenLlama,
    Record,
    Sample,
    SingleModel,
    Task,
    Vocabulary,
    memory,
)
from pylongctx.llama import Llama
from pylongctx.methods import NONE
from pylongctx.readers.files import plain_text

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
    """Return ``exp(mean_nll(llm, tokens, last))``."""
    return math.exp(mean_nll(llm, tokens, last))


# ---- pieces of a text ----


def read_text(path: str) -> str:
    """Return a file's text without a last newline, as llama.cpp's ``-f`` reads it."""
    if not Path(path).is_file():
        raise ValueError(f"there is no text file {path!r}")
    return plain_text(path).removesuffix("\n")


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

    name = "perplexity"
    headline: ClassVar[str] = "perplexity"
    file: str | tuple[str, ...]
    mode: str = "llama.cpp"
    chunks: int | None = None
    stride: int = 256

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


# ---- divergence from another method ----

Floats = NDArray[np.float64]
Rows = Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]
DP = "\u0394p"  # llama.cpp's label of the change of a probability
NEGLIGIBLE = -16.0  # log-probabilities of the base below are left out, as in llama.cpp
N_FOR_ERRORS = 10  # llama.cpp gives no uncertainty for fewer tokens
PERCENTILES = {"99.9%": 99.9, "99.0%": 99, "95.0%": 95, "90.0%": 90, "75.0%": 75, "Median": 50, "25.0%": 25,
               "10.0%": 10, " 5.0%": 5, " 1.0%": 1, " 0.1%": 0.1}  # fmt: skip


def divergence(base: NDArray[np.float32], other: NDArray[np.float32]) -> Floats:
    """Return the divergence of each row of log-probabilities from that of the base.

    Examples
    --------
    >>> same = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    >>> divergence(same, same)
    array([0.])
    """
    p = base.astype(np.float64)
    terms = np.exp(p) * (p - other)
    return np.asarray(np.where(p > NEGLIGIBLE, terms, 0.0).sum(-1))


@dataclass(frozen=True)
class Divergence(Task):
    """Divergence of a method's predictions from those of ``base`` on one or several texts.

    Attributes
    ----------
    file : str or tuple of str
        UTF-8 texts.
    chunks : int or None
        The number of chunks of each text, from the first on; None: all.
    base : str
        Method that is right by definition; its KV cache is f16.

    Examples
    --------
    >>> from pylongctx.eval.runner import Cell, run
    >>> task = Divergence("book.txt", chunks=1)
    >>> records = list(run(Cell("model.gguf", "full", task, length=200)))
    >>> task.summary(records)["Mean KLD"]
    0.0
    """

    name = "kld"
    headline: ClassVar[str] = "Mean KLD"
    file: str | tuple[str, ...]
    chunks: int | None = None
    base: str = "full"

    @property
    def settings(self) -> Record:
        """The method that the divergence is measured from."""
        return {"base": self.base}

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return the chunks of the texts; the seed changes nothing."""
        if length < 4:
            raise ValueError(f"length {length} is too short")
        return pieces_of(self.file, str(length), lambda text: chunks(vocabulary, text, length)[: self.chunks])

    @contextmanager
    def opened(self, open_llama: OpenLlama, chat: bool | Chat) -> Iterator[Evaluate]:
        """Open the model with both methods, and yield a function that runs samples."""
        with open_llama(None) as llm, open_llama(self.base) as base:
            vocabulary = ModelVocabulary(llm, chat)
            chosen = {"method": str(llm.method or NONE), "base": str(base.method or NONE)}
            yield lambda samples: (
                chosen | compare(llm, base, vocabulary.tokens(sample)) | dict(sample.facts) for sample in samples
            )

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return llama-perplexity's statistics by their labels; ``error`` is that of the mean divergence."""
        joined = {key: np.concatenate([np.asarray(r[key], float) for r in records]) for key in PER_TOKEN}
        return statistics(**joined)

    def cell_text(self, records: Sequence[Record]) -> str:
        """Return the text of a table cell."""
        found = self.summary(records)
        return f"{found['Mean KLD']:.5f} \u00b1 {found['Mean KLD error']:.5f}"


PER_TOKEN = ("nll", "nll_base", "kld", "same_top")


def compare(llm: Llama, base: Llama, tokens: NDArray[np.int32]) -> Record:
    """Return for each scored token of a chunk both likelihoods, the divergence, and whether the likeliest agree.

    Examples
    --------
    >>> with Llama("model.gguf", method="full", n_ctx=512, verbose=False) as base:
    ...     record = compare(llm, base, np.array(tokens[:100], np.int32))
    >>> len(record["kld"])
    49
    """
    found: dict[str, list[Any]] = {key: [] for key in PER_TOKEN}
    first = len(tokens) // 2
    ours, theirs = scored_rows(llm, tokens, first), scored_rows(base, tokens, first)
    for rows, base_rows, following in side_by_side(ours, theirs):
        logp, base_logp = llm.logits_to_logprobs(rows), llm.logits_to_logprobs(base_rows)
        at = np.arange(len(following)), following
        found["nll"] += (-logp[at]).tolist()
        found["nll_base"] += (-base_logp[at]).tolist()
        found["kld"] += divergence(base_logp, logp).tolist()
        found["same_top"] += (rows.argmax(-1) == base_rows.argmax(-1)).astype(int).tolist()
    return {"n_tokens": len(tokens)} | found


def side_by_side(ours: Rows, theirs: Rows) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32], Any]]:
    """Yield equal numbers of rows of both, and what follows them; methods may take steps of different sizes.

    Examples
    --------
    >>> def rows(*sizes):
    ...     for n in sizes:
    ...         yield np.zeros((n, 3), np.float32), np.zeros(n, np.int32)
    >>> [len(following) for ours, theirs, following in side_by_side(rows(4, 4), rows(3, 5))]
    [3, 1, 4]
    """
    a: Any = None
    b: Any = None
    while True:
        a, b = (a if a and len(a[0]) else next(ours, None)), (b if b and len(b[0]) else next(theirs, None))
        if a is None or b is None:
            return
        n = min(len(a[0]), len(b[0]))
        yield a[0][:n], b[0][:n], a[1][:n]
        a, b = (a[0][n:], a[1][n:]), (b[0][n:], b[1][n:])


def statistics(nll: Floats, nll_base: Floats, kld: Floats, same_top: Floats) -> dict[str, float]:
    """Return llama-perplexity's statistics of divergences and of probabilities, by its labels.

    Examples
    --------
    >>> nll = np.linspace(1.0, 2.0, 20)
    >>> statistics(nll, nll, kld=np.zeros(20), same_top=np.ones(20))["Same top p"]
    100.0
    """
    (mean, error), (mean_base, error_base) = _mean(nll), _mean(nll_base)
    covariance = float(np.cov(nll, nll_base, ddof=0)[0, 1]) / (len(nll) - 1) if len(nll) >= N_FOR_ERRORS else 0.0
    ratio, ratio_error = np.exp(mean - mean_base), np.sqrt(max(0.0, error**2 + error_base**2 - 2 * covariance))
    change = np.exp(-nll) - np.exp(-nll_base)
    top = same_top.mean()
    rms, rms_error = _mean(change**2)
    found = {
        "Mean PPL(Q)": np.exp(mean),
        "Mean PPL(Q) error": np.exp(mean) * error,
        "Mean PPL(base)": np.exp(mean_base),
        "Mean PPL(base) error": np.exp(mean_base) * error_base,
        "Mean ln(PPL(Q)/PPL(base))": mean - mean_base,
        "Mean ln(PPL(Q)/PPL(base)) error": ratio_error,
        "Cor(ln(PPL(Q)), ln(PPL(base)))": 100 * covariance / (error * error_base) if error * error_base else 100.0,
        "Mean PPL(Q)/PPL(base)": ratio,
        "Mean PPL(Q)/PPL(base) error": ratio * ratio_error,
        "Mean PPL(Q)-PPL(base)": np.exp(mean) - np.exp(mean_base),
        "Mean KLD": _mean(kld)[0],
        "Mean KLD error": _mean(kld)[1],
        **_spread("KLD", kld),
        f"Mean {DP}": 100 * _mean(change)[0],
        f"Mean {DP} error": 100 * _mean(change)[1],
        **_spread(DP, 100 * change),
        f"RMS {DP}": 100 * np.sqrt(rms),
        f"RMS {DP} error": 50 * rms_error / np.sqrt(rms) if rms else 0.0,
        "Same top p": 100 * top,
        "Same top p error": 100 * np.sqrt(top * (1 - top) / max(1, len(nll) - 1)),
    }
    return {label: float(value) for label, value in found.items()}


def _mean(values: Floats) -> tuple[float, float]:
    """Return the mean and its standard error, 0 for few values."""
    error = values.std() / np.sqrt(len(values) - 1) if len(values) > N_FOR_ERRORS else 0.0
    return float(values.mean()), float(error)


def _spread(what: str, values: Floats) -> dict[str, float]:
    found = np.percentile(values, list(PERCENTILES.values()))
    middle = {f"{label.strip()} {what}": value for label, value in zip(PERCENTILES, found, strict=True)}
    return {f"Maximum {what}": values.max(), **middle, f"Minimum {what}": values.min()}
