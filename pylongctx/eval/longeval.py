"""LongEval's line retrieval (LongChat): the user's file, its prompt and score.

The prompt is the file's own; the score is that of longeval/utils.py of https://github.com/DachengLi1/LongChat: the last
number of the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pylongctx.eval.files import Kind, read_rows, stem
from pylongctx.eval.fitting import part_around
from pylongctx.eval.scorers import last_number
from pylongctx.eval.task import Answer, Question, Sample, Vocabulary

FIELDS: dict[str, Kind] = {"prompt": str, "correct_line": str, "expected_number": int}
LINES = re.compile(r"(?<=\n)(?:line [^\n]*\n)+")  # all lines of the record, without the words around


@dataclass(frozen=True)
class LongEval(Question):
    """Answer with the number in one of many lines.

    Attributes
    ----------
    data : str
        A file of LongEval, such as ``200_lines.jsonl``.
    tests : int or None
        Only so many cases, the first ones.

    Examples
    --------
    >>> LongEval("longeval/200_lines.jsonl").name
    'longeval-200_lines'
    """

    headline: ClassVar[str] = "score"
    data: str
    tests: int | None = None
    max_tokens: int = 100
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"longeval-{stem(self.data)}")

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per case, with fewer lines where all do not fit. The seed changes nothing."""
        rows = read_rows(self.data, FIELDS, "--data is a file of LongEval, such as 200_lines.jsonl")
        return [self._sample(vocabulary, length, i, row) for i, row in enumerate(rows[: self.tests])]

    def _sample(self, vocabulary: Vocabulary, length: int, i: int, row: dict[str, Any]) -> Sample:
        record = LINES.search(row["prompt"])
        lines = record.group().splitlines(keepends=True) if record else []
        if record is None or row["correct_line"] not in lines:
            raise ValueError(f"{self.data}, case {i + 1}: 'correct_line' is not a line of 'prompt'")
        at = lines.index(row["correct_line"])
        before, after = row["prompt"][: record.start()], row["prompt"][record.end() :]

        def sample(part: slice) -> Sample:
            kept = lines[part]
            facts = {"lines": len(kept), "lines_of_case": len(lines), "place": at - part.start}
            answers = (str(row["expected_number"]),)
            prompt = before + "".join(kept) + after
            return Sample(f"{length}-{i}", prompt, answers=answers, max_tokens=self.max_tokens, facts=facts)

        return part_around(vocabulary, sample, len(lines), at, length, f"{self.name}, length {length}")

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return whether the last number of the answer is the right one."""
        return {"score": last_number(answer.text, sample.answers)}
