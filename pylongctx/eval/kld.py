"""Kullback-Leibler divergence of a method from another, token by token: llama.cpp's numbers, without its file.

Both run side by side on the chunks of llama-perplexity, so no log-probabilities are stored or rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pylongctx.eval.perplexity import chunks, pieces_of, scored_rows
from pylongctx.eval.task import Evaluate, ModelVocabulary, OpenLlama, Record, Sample, Task, Vocabulary
from pylongctx.llama import Llama
from pylongctx.methods import NONE

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

    headline: ClassVar[str] = "Mean KLD"
    file: str | tuple[str, ...]
    chunks: int | None = None
    base: str = "full"
    name: str = field(default="kld", init=False)

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
    def opened(self, open_llama: OpenLlama, chat: bool) -> Iterator[Evaluate]:
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
