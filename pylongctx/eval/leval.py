"""L-Eval's closed-ended tasks: the user's files, its prompts and scores (arXiv 2307.11088).

Prompts are those of Baselines/llama2-chat-test.py; the system prompt begins the message, since many templates have no
place for it. Documents lose their end where they are too long, as there. Answers are shorter than the 512 tokens that
the authors allow, where the score reads their beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pylongctx.eval.files import Kind, published, read_rows
from pylongctx.eval.fitting import Make, fitted
from pylongctx.eval.scorers import contained, mean, multiple_choice, same_number
from pylongctx.eval.task import Answer, FileQuestion, Record, Sample, Vocabulary

HINT = "--data is a file of L-Eval, such as quality.jsonl"
FIELDS: dict[str, Kind] = {"input": str, "instructions": list, "outputs": list}
PLACES = ("first", "second", "third")  # of a topic, in the order of the questions


@dataclass(frozen=True)
class LEval(FileQuestion):
    """Answer questions about documents: choices, numbers and topics.

    Attributes
    ----------
    data : str
        A file of L-Eval: ``quality.jsonl``, ``coursera.jsonl``, ``gsm100.jsonl`` or ``topic_retrieval_longchat.jsonl``.
        The name tells the kind, as in L-Eval; another one has choices of which one is right.
    max_tokens : int or None
        Most tokens of an answer. None: 32 for letters, 64 for topics, 512 for a calculation.

    Examples
    --------
    >>> LEval("LEval/gsm100.jsonl").kind
    'gsm'
    """

    @property
    def name(self) -> str:
        """The name of the file."""
        return Path(self.data).stem

    @property
    def kind(self) -> str:
        """The kind of questions: gsm, topic, coursera or choice."""
        return next((kind for kind in ("gsm", "topic", "coursera") if kind in self.name), "choice")

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per question; long documents lose their end. The seed changes nothing."""
        asked: list[tuple[str, Make]] = []  # all examples of gsm100 are the same document
        for i, row in enumerate(read_rows(self.data, FIELDS, HINT)):
            questions = zip(row["instructions"], row["outputs"], strict=True)
            for j, (question, output) in enumerate(questions):
                asked.append((row["input"], partial(self._sample, f"{length}-{i}-{j}", j, question, output)))
        return fitted(vocabulary, asked, length, f"{self.name}, length {length}", self.tests)

    def _sample(self, name: str, j: int, question: str, output: str, document: str) -> Sample:
        task = published("leval")[self.kind]
        before, after = (task["system"] + task["prompt"]).split("{document}")
        prompt, n = before + document + after.format(question=question), self.max_tokens or task["max_tokens"]
        facts, shared = {"question": j}, len(before + document)
        return Sample(name, prompt, task["prefix"], (output,), n, tuple(task["stop"]), facts=facts, shared=shared)

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return L-Eval's exact match: of the letters (0.25 for some of the right ones), the number, or the topic."""
        text = answer.text.strip()
        if self.kind == "gsm":
            return {"score": same_number(text, sample.answers)}
        if self.kind == "topic":
            return {"score": contained(text, sample.answers)}
        return {"score": multiple_choice(text, sample.answers, self.kind == "coursera")}

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the mean score; of topics also that of the first, the second and the third one."""
        found = super().summary(records)
        if self.kind == "topic":
            for j, place in enumerate(PLACES):
                found[place] = mean(record["score"] for record in records if record["question"] == j)
        return found
