"""Key-value retrieval of Lost in the Middle (arXiv 2307.03172): the user's file, its prompt and score."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pylongctx.eval.files import Kind, published, read_rows, stem
from pylongctx.eval.fitting import part_around
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
        Only so many cases, the first ones.
    place : int or None
        Where the pair stands that is asked for, from 0 on, as in the published scripts. None: where the file has it.

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
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", stem(self.data) + (f"-at-{self.place}" if self.place is not None else ""))

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per case, with fewer pairs where all do not fit. The seed changes nothing."""
        rows = read_rows(self.data, FIELDS, HINT)
        return [self._sample(vocabulary, length, i, row) for i, row in enumerate(rows[: self.tests])]

    def _sample(self, vocabulary: Vocabulary, length: int, i: int, row: dict[str, Any]) -> Sample:
        task, asked = published("keyvalue")["keyvalue"], [row["key"], row["value"]]
        pairs = [list(pair) for pair in row["ordered_kv_records"]]
        if asked not in pairs:
            raise ValueError(f"{self.data}, case {i + 1}: the pair of 'key' and 'value' is not in 'ordered_kv_records'")
        at = pairs.index(asked)
        if self.place is not None:
            if not 0 <= self.place < len(pairs):
                raise ValueError(f"{self.data}, case {i + 1} has {len(pairs)} pairs: place must be from 0 on and less")
            pairs.insert(self.place, pairs.pop(at))
            at = self.place

        def sample(part: slice) -> Sample:
            kept = pairs[part]
            records = "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in kept) + "}"
            prompt = task["prompt"].format(records=records, key=row["key"])
            facts = {"pairs": len(kept), "pairs_of_case": len(pairs), "place": at - part.start}
            n = self.max_tokens or task["max_tokens"]
            return Sample(f"{length}-{i}", prompt, answers=(row["value"],), max_tokens=n, facts=facts)

        return part_around(vocabulary, sample, len(pairs), at, length, f"{self.name}, length {length}")

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return whether the value is in the answer."""
        return {"score": string_match_part(answer.text, sample.answers)}
