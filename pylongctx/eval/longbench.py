"""LongBench (arXiv 2308.14508): the user's files, its prompts, middle truncation and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pylongctx.eval import scorers
from pylongctx.eval.files import Kind, after_context, published, read_rows
from pylongctx.eval.scorers import mean
from pylongctx.eval.task import Answer, Question, Record, Sample, Vocabulary

MARGIN = 16  # tokens by which a prompt may grow when its cut halves are joined
FIELDS: dict[str, Kind] = {"context": str, "input": str, "answers": list, "length": int}
BUCKETS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, float("inf"))}  # words, of LongBench-E


def tasks() -> dict[str, Any]:
    """Return prompt, longest answer and metric of every task."""
    return published("longbench")


def cut_middle(vocabulary: Vocabulary, text: str, n: int) -> str:
    """Return a text of which only the first and the last ``n // 2`` tokens are left when it has more than ``n``.

    BOS counts, and is dropped from the first half.
    """
    n_bos = len(vocabulary.bos)
    tokens, half = vocabulary.tokenize(text), n // 2
    if len(tokens) + n_bos <= n:
        return text
    return vocabulary.detokenize(tokens[: half - n_bos]) + vocabulary.detokenize(tokens[-half:])


@dataclass(frozen=True)
class LongBench(Question):
    """One of LongBench's 21 tasks.

    Attributes
    ----------
    name : str
        Such as "hotpotqa".
    data : str
        Folder with ``hotpotqa.jsonl``, or ``hotpotqa_e.jsonl`` for LongBench-E.
    tests : int or None
        The number of samples, from the first on; None: all.
    e : bool
        LongBench-E: numbers by length of the text, in words.
    max_length : int or None
        Tokens at which prompts are cut in the middle. None: what the length leaves besides the answer.
    """

    name: str = "hotpotqa"
    data: str = "."
    tests: int | None = None
    e: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        known = [name for name, task in tasks().items() if task["e"] or not self.e]
        if self.name not in known:
            raise ValueError(f"LongBench{'-E' * self.e} has no task {self.name!r}; available: {', '.join(known)}")

    def _lines(self) -> list[dict[str, Any]]:
        file = Path(self.data) / f"{self.name}{'_e' * self.e}.jsonl"
        classes: dict[str, Kind] = {"all_classes": list} if tasks()[self.name]["metric"] == "classification" else {}
        return read_rows(file, FIELDS | classes, "--data is a folder with LongBench's .jsonl files")[: self.tests]

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return the samples of the file; the seed changes nothing."""
        task = tasks()[self.name]
        most = self.max_length or length - task["max_gen"] - vocabulary.overhead + len(vocabulary.bos) - MARGIN
        if most < 2:
            raise ValueError(f"{self.name}, length {length}: the answer alone may have {task['max_gen']} tokens")
        return [self._sample(vocabulary, i, line, task, most, length) for i, line in enumerate(self._lines())]

    def _sample(
        self, vocabulary: Vocabulary, i: int, line: dict[str, Any], task: dict[str, Any], most: int, length: int
    ) -> Sample:
        fields = {"context": line["context"], "input": line["input"]}
        prompt = cut_middle(vocabulary, task["prompt"].format(**fields), most)
        question = after_context(task["prompt"]).format(**fields)
        return Sample(
            f"{length}-{i}{'-e' * self.e}",
            prompt,
            answers=tuple(line["answers"]),
            max_tokens=task["max_gen"],
            stop=tuple(task["stop"]),
            chat=task["chat"],
            facts={"words": line["length"], "classes": line.get("all_classes")},
            shared=len(prompt) - len(question) if prompt.endswith(question) else 0,
        )

    def n_ctx(self, vocabulary: Vocabulary, samples: Sequence[Sample], length: int) -> int:
        """Return the length, or more where ``max_length`` asks for it."""
        if self.max_length is None:
            return length
        return max(length, *(len(vocabulary.tokens(sample)) + sample.max_tokens for sample in samples))

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return the score of the task's metric; the best of the answers counts."""
        task, text = tasks()[self.name], answer.text
        if task["first_line"]:
            text = text.lstrip("\n").split("\n")[0]
        metric: Callable[[str, Sequence[str]], float] = getattr(scorers, task["metric"])
        if task["metric"] == "classification":
            metric = partial(scorers.classification, classes=sample.facts["classes"])
        return {"score": round(metric(text, sample.answers), 6)}

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the mean score, and with LongBench-E that of every range of lengths."""
        found = {"score": mean(record["score"] for record in records)}
        if self.e:
            for name, (low, high) in BUCKETS.items():
                found[name] = mean(record["score"] for record in records if low <= record["words"] < high)
        return found
