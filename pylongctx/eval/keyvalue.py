"""Key-value retrieval of Lost in the Middle (arXiv 2307.03172): the user's file, its prompt and score."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pylongctx.eval.files import Kind, published, read_rows, stem
from pylongctx.eval.fitting import questions_on_parts
from pylongctx.eval.scorers import string_match_part
from pylongctx.eval.task import Answer, Question, Sample, Vocabulary

HINT = "--data is a file of Lost in the Middle, such as kv-retrieval-75_keys.jsonl.gz"
FIELDS: dict[str, Kind] = {"ordered_kv_records": list, "key": str, "value": str}


@dataclass(frozen=True)
class KeyValue(Question):
    """Answer with the value of a key in a JSON object of random keys and values.

    Attributes
    ----------
    data : str
        A file of the benchmark, such as ``kv-retrieval-75_keys.jsonl.gz``.
    tests : int or None
        The number of cases, from the first on; None: all.
    place : int or None
        Where the pair stands that is asked for, from 0 on, as in the published scripts. None: where the file has it.
    questions : int
        Questions about the pairs of each case: its own, then others for evenly spaced pairs.

    Examples
    --------
    >>> KeyValue("kv-retrieval-75_keys.jsonl.gz").name
    'kv-retrieval-75_keys'
    """

    headline: ClassVar[str] = "score"
    data: str
    tests: int | None = None
    max_tokens: int | None = None
    place: int | None = None
    questions: int = 1
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", stem(self.data) + (f"-at-{self.place}" if self.place is not None else ""))

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return the samples of each case, with fewer pairs where all do not fit. The seed changes nothing."""
        rows = read_rows(self.data, FIELDS, HINT)
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
