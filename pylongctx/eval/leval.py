"""Multiple choice on long documents, in L-Eval's files and with its score (arXiv 2307.11088); the prompt is our own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pylongctx.eval.scorers import multiple_choice
from pylongctx.eval.task import Answer, Question, Sample, Vocabulary

SEVERAL = "coursera"  # the one of L-Eval's tasks in which several letters can be right
ONE_RIGHT = "exactly one of them is right. Answer with its letter alone, such as B."
SOME_RIGHT = "one or several of them are right. Answer with their letters alone, such as B or AC."
PROMPT = "Read a document and answer a question with choices; {rule}\n\nDocument:\n{document}\n\nQuestion: {question}"
MARGIN = 8  # tokens by which a document may grow when it is cut and joined


@dataclass(frozen=True)
class Choices(Question):
    """Choose the right answers to questions about documents.

    Attributes
    ----------
    data : str
        A file of L-Eval such as ``quality.jsonl``: one document per line with "instructions" and "outputs".
    tests : int or None
        Only so many questions, the first ones.
    several : bool or None
        Whether several letters can be right. None: in a file named ``coursera``.
    """

    headline: ClassVar[str] = "score"
    data: str
    tests: int | None = None
    several: bool | None = None
    max_tokens: int = 16
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", Path(self.data).stem)

    @property
    def _several(self) -> bool:
        return self.name.startswith(SEVERAL) if self.several is None else self.several

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per question; long documents lose their end. The seed changes nothing."""
        file = Path(self.data)
        if not file.is_file():
            raise ValueError(f"{file} does not exist; --data is a file of L-Eval, such as quality.jsonl")
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        asked = [(i, j, line) for i, line in enumerate(lines) for j in range(len(line["instructions"]))]
        return [self._sample(vocabulary, length, i, j, line) for i, j, line in asked[: self.tests]]

    def _sample(self, vocabulary: Vocabulary, length: int, i: int, j: int, line: dict[str, Any]) -> Sample:
        rule = SOME_RIGHT if self._several else ONE_RIGHT

        def sample(document: str) -> Sample:
            prompt = PROMPT.format(rule=rule, document=document, question=line["instructions"][j].strip())
            answers = (line["outputs"][j],)
            return Sample(f"{length}-{i}-{j}", prompt, "\nAnswer:", answers, self.max_tokens)

        room = length - len(vocabulary.tokens(sample(""))) - self.max_tokens - MARGIN
        if room < 1:
            raise ValueError(f"{self.name}, length {length}: the question alone is longer")
        tokens = vocabulary.tokenize(line["input"])
        return sample(line["input"] if len(tokens) <= room else vocabulary.detokenize(tokens[:room]))

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return 1 for the right letters and 0.25 for some of them, as L-Eval does."""
        return {"score": multiple_choice(answer.text.strip(), sample.answers, self._several)}
