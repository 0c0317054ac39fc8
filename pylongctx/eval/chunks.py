"""The chunks that heads read while they answer with a pass key: LongHeads' table 3 and figure 5."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pylongctx.attention import chunks_of, findings
from pylongctx.eval.passkey import Passkey
from pylongctx.eval.scorers import mean
from pylongctx.eval.task import Record, Sample, SingleModel, Vocabulary, greedy
from pylongctx.llama import Llama
from pylongctx.methods import NONE, LongHeads, Method

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Chunks(SingleModel):
    """Ask for a pass key as ``Passkey`` does in its style ``fill``, and record what is read for the answer's tokens.

    Attributes
    ----------
    depths, haystack, separator
        Those of ``Passkey``.
    """

    name = "chunks"
    headline: ClassVar[str] = "cover_rate"
    tests: int = 1
    depths: tuple[float, ...] = ()
    haystack: str = "sentences"
    separator: str = "space"

    @property
    def _question(self) -> Passkey:
        return Passkey(tests=self.tests, depths=self.depths, haystack=self.haystack, separator=self.separator)

    def refusal(self, method: Method | None) -> str:
        """Return the reason why a method that does not select chunks cannot be measured."""
        if method and any(isinstance(part, LongHeads) for part in method.parts):
            return ""
        return (
            f"{self.name} shows what longheads chooses, and {method.name if method else NONE!r} chooses no chunks; "
            'give the task its own methods = ["longheads"]'
        )

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one question per trial."""
        return self._question.samples(vocabulary, length, seed)

    def run(self, llm: Llama, vocabulary: Vocabulary, sample: Sample) -> Record:
        """Return how often each head read each chunk, the numbers of table 3, and whether the answer is right."""
        tokens = vocabulary.tokens(sample)
        start = len(tokens) - 1  # the query that predicts the first token of the answer
        with llm.trace(start, start + sample.max_tokens) as trace:
            answer, _, _ = greedy(llm, tokens, sample)
        right = self._question.scores(sample, answer)[Passkey.headline]
        said = {"answer": answer.text, "answers": list(sample.answers), "right": right}
        first, last = sample.facts["needle"]
        found = findings(trace, chunks_of(first, last, trace.chunk_size))
        reads = {"forced": trace.forced().sum(axis=0).tolist(), "reads": pack(trace.reads())}
        return {"n_tokens": len(tokens) + sample.max_tokens, **sample.facts, **said, **found, **reads}

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the means of the numbers of all answer tokens."""
        return means(record["all"] for record in records)


def means(numbers: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the mean of every number of table 3, without the texts for which it says nothing."""
    known: dict[str, list[float]] = {}
    for name, value in (pair for each in numbers for pair in each.items()):
        known.setdefault(name, []).extend([] if value is None else [value])
    return {name: mean(values) for name, values in known.items() if values}


# ---- counts in a record ----


def pack(reads: Counts) -> list[Any]:
    """Return counts [layer, head, chunk] as lists [layer][head] of pairs [chunk, count], the counts not 0."""
    return [[[[int(c), int(row[c])] for c in np.flatnonzero(row)] for row in heads] for heads in reads]


def unpack(record: Record) -> tuple[Counts, Counts]:
    """Return the queries that read a chunk, int64 [n_layer, n_head, n_chunks], or had to, int64 [n_chunks]."""
    forced = np.array(record["forced"], np.int64)
    reads = np.zeros((len(record["reads"]), len(record["reads"][0]), len(forced)), np.int64)
    for row, pairs in zip(reads.reshape(-1, len(forced)), (p for heads in record["reads"] for p in heads), strict=True):
        for chunk, count in pairs:
            row[chunk] = count
    return reads, forced
