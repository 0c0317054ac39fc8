"""Retrieval of one of many entries: the key-value pairs of Lost in the Middle, and the lines of LongEval.

Key-value retrieval of Lost in the Middle (arXiv 2307.03172): the user's file, its prompt and score.

LongEval's line retrieval (LongChat): the user's file, its prompt and score.

The prompt is the file's own; the score is that of longeval/utils.py of https://github.com/DachengLi1/LongChat: the last
number of the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pylongctx.eval.files import Kind, published, read_rows, stem
from pylongctx.eval.fitting import questions_on_parts
from pylongctx.eval.scorers import last_number, string_match_part
from pylongctx.eval.task import Answer, FileQuestion, Sample, Vocabulary

HINT = "--data is a file of Lost in the Middle, such as kv-retrieval-75_keys.jsonl.gz"
PAIR_FIELDS: dict[str, Kind] = {"ordered_kv_records": list, "key": str, "value": str}


@dataclass(frozen=True)
class KeyValue(FileQuestion):
    """Answer with the value of a key in a JSON object of random keys and values.

    Attributes
    ----------
    data : str
        A file of the benchmark, such as ``kv-retrieval-75_keys.jsonl.gz``.
    place : int or None
        Where the pair stands that is asked for, from 0 on, as in the published scripts. None: where the file has it.
    questions : int
        Questions about the pairs of each case: its own, then others for evenly spaced pairs.

    Examples
    --------
    >>> KeyValue("kv-retrieval-75_keys.jsonl.gz").name
    'kv-retrieval-75_keys'
    """

    place: int | None = None
    questions: int = 1

    @property
    def name(self) -> str:
        """The name of the file, and the place."""
        return stem(self.data) + (f"-at-{self.place}" if self.place is not None else "")

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return the samples of each case, with fewer pairs where all do not fit. The seed changes nothing."""
        rows = read_rows(self.data, PAIR_FIELDS, HINT)
        return [sample for i, row in enumerate(rows[: self.tests]) for sample in self._case(vocabulary, length, i, row)]

    def _case(self, vocabulary: Vocabulary, length: int, i: int, row: dict[str, Any]) -> list[Sample]:
        task, asked_pair = published("keyvalue")["keyvalue"], [row["key"], row["value"]]
        pairs = [list(pair) for pair in row["ordered_kv_records"]]
        if asked_pair not in pairs:
            raise ValueError(f"{self.data}, case {i + 1}: the pair of 'key' and 'value' is not in 'ordered_kv_records'")
        at = pairs.index(asked_pair)
        if self.place is not None:
            if not 0 <= self.place < len(pairs):
                raise ValueError(f"{self.data}, case {i + 1} has {len(pairs)} pairs: place must be from 0 on and less")
            pairs.insert(self.place, pairs.pop(at))
            at = self.place

        def sample(part: slice, asked: int) -> Sample:
            key, value = pairs[asked]
            records = "{" + ",\n ".join(f'"{name}": "{other}"' for name, other in pairs[part]) + "}"
            prompt = task["prompt"].format(records=records, key=key)
            facts = {"pairs": part.stop - part.start, "pairs_of_case": len(pairs), "place": asked - part.start}
            n, shared = self.max_tokens or task["max_tokens"], prompt.rindex(key)
            name = f"{length}-{i}" + ("" if asked == at else f"-{asked}")
            return Sample(name, prompt, answers=(value,), max_tokens=n, facts=facts, shared=shared)

        where, keys = f"{self.name}, length {length}", [key for key, _ in pairs]
        return questions_on_parts(vocabulary, sample, keys, at, length, where, self.questions)

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return whether the value is in the answer."""
        return {"score": string_match_part(answer.text, sample.answers)}


# ---- LongEval's lines ----

LINE_FIELDS: dict[str, Kind] = {"prompt": str, "correct_line": str, "expected_number": int}
LINE = re.compile(r"line ([^:\n]+): [^\n]*?<(\d+)>\n?")
LINES = re.compile(r"(?<=\n)(?:line [^\n]*\n)+")  # all lines of the record, without the words around


@dataclass(frozen=True)
class LongEval(FileQuestion):
    """Answer with the number in one of many lines.

    Attributes
    ----------
    data : str
        A file of LongEval, such as ``200_lines.jsonl``.
    questions : int
        Questions about the lines of each case: its own, then others for evenly spaced lines in the same words.

    Examples
    --------
    >>> LongEval("longeval/200_lines.jsonl").name
    'longeval-200_lines'
    """

    max_tokens: int = 100
    questions: int = 1

    @property
    def name(self) -> str:
        """The benchmark and the name of the file."""
        return f"longeval-{stem(self.data)}"

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return the samples of each case, with fewer lines where all do not fit. The seed changes nothing."""
        rows = read_rows(self.data, LINE_FIELDS, "--data is a file of LongEval, such as 200_lines.jsonl")
        return [sample for i, row in enumerate(rows[: self.tests]) for sample in self._case(vocabulary, length, i, row)]

    def _case(self, vocabulary: Vocabulary, length: int, i: int, row: dict[str, Any]) -> list[Sample]:
        record, asked_line = LINES.search(row["prompt"]), LINE.fullmatch(row["correct_line"])
        lines = record.group().splitlines(keepends=True) if record else []
        if record is None or asked_line is None or row["correct_line"] not in lines:
            raise ValueError(f"{self.data}, case {i + 1}: 'correct_line' is not a line of 'prompt'")
        before, after = row["prompt"][: record.start()], row["prompt"][record.end() :]
        found = [LINE.fullmatch(line) for line in lines]
        names, numbers = [[match[k] if match else "" for match in found] for k in (1, 2)]
        at = lines.index(row["correct_line"])

        def sample(part: slice, asked: int) -> Sample:
            facts = {"lines": part.stop - part.start, "lines_of_case": len(lines), "place": asked - part.start}
            own, text = asked == at, before + "".join(lines[part])
            prompt = text + (after if own else after.replace(names[at], names[asked]))
            answers = (str(row["expected_number"]) if own else numbers[asked],)
            name = f"{length}-{i}" + ("" if own else f"-{asked}")
            return Sample(name, prompt, answers=answers, max_tokens=self.max_tokens, facts=facts, shared=len(text))

        where = f"{self.name}, length {length}"
        return questions_on_parts(vocabulary, sample, names, at, length, where, self.questions)

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return whether the last number of the answer is the right one."""
        return {"score": last_number(answer.text, sample.answers)}
