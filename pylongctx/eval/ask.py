"""Questions with short answers about whole files, asked as ``pylongctx ask`` asks them.

Every second question of a text was used to choose the prompt; the others are reported apart, as ``held``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pylongctx.chat.asking import INSTRUCTION, prompt, quotes
from pylongctx.chat.loops import is_loop
from pylongctx.eval.files import Kind, check_fields, read_json
from pylongctx.eval.scorers import mean
from pylongctx.eval.task import Record, Sample, SingleModel, Vocabulary, memory
from pylongctx.llama import Llama
from pylongctx.readers.files import FileText, read_file

HINT = "--data is a file such as bench/ask/questions.json"
TEXT: dict[str, Kind] = {"file": str, "questions": list}
QUESTION: dict[str, Kind] = {"question": str, "answers": list, "passage": str}
PARTS = ("tuned", "held")


@dataclass(frozen=True)
class Ask(SingleModel):
    """Answer questions about files of several lengths.

    Attributes
    ----------
    data : str
        A JSON file with ``texts``: each has a ``file``, beside the JSON file, perhaps ``end``, a line before which the
        text ends, and ``questions`` with ``question``, ``answers`` (groups of alternatives, of each of which one has
        to occur) and ``passage``, where the text says it.
    tests : int or None
        Questions of each text; None: all.
    instructed : bool
        With the instruction of ``pylongctx ask``. False: text and question alone.
    repeat_penalty : float
        For tokens of the answer, which is greedy.

    Examples
    --------
    >>> Ask("bench/ask/questions.json", tests=2).name
    'ask'
    """

    reads_once: ClassVar[bool] = True
    caption: ClassVar[str] = "percent of the questions answered right"
    data: str
    tests: int | None = None
    max_tokens: int = 128
    instructed: bool = True
    repeat_penalty: float = 1.05

    @property
    def name(self) -> str:
        """The task, and that it has no instruction."""
        return "ask" if self.instructed else "ask-plain"

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per question, those of a text in a row.

        Raises ValueError when a text and its answers need more than ``length`` tokens.
        """
        found: list[Sample] = []
        for asked, file in read_texts(self.data):
            needed = len(vocabulary.tokenize(file.framed)) + vocabulary.overhead + 2 * self.max_tokens
            if needed > length:
                raise ValueError(f"{file.name} needs {needed} tokens, more than the length {length}; use --lengths")
            for i, one in enumerate(asked[: self.tests]):
                found.append(self._sample(f"{length}-{Path(file.name).stem}-{i}", file, one, PARTS[i % 2]))
        return found

    def _sample(self, name: str, file: FileText, asked: Mapping[str, Any], part: str) -> Sample:
        answers = tuple("|".join(group) for group in asked["answers"])
        facts = {"question": asked["question"], "passage": asked["passage"], "part": part, "file": file}
        text = prompt(file.framed, asked["question"])
        return Sample(name, text, answers=answers, max_tokens=self.max_tokens, facts=facts, shared=len(file.framed))

    def run(self, llm: Llama, vocabulary: Vocabulary, sample: Sample) -> Record:
        """Ask one question; the cached beginning of the text stays."""
        start, before = time.perf_counter(), llm.session.n_evaluated
        messages = [{"role": "system", "content": INSTRUCTION}] if self.instructed else []
        messages.append({"role": "user", "content": str(sample.prompt)})
        found = llm.create_chat_completion(
            messages, temperature=0.0, repeat_penalty=self.repeat_penalty, max_tokens=sample.max_tokens
        )
        answer = found["choices"][0]["message"]["content"] or ""
        facts = dict(sample.facts)
        passages = quotes([facts.pop("file")], facts["question"], answer)
        n_answer = found["usage"]["completion_tokens"]
        return {
            **facts,
            "answer": answer,
            "answers": list(sample.answers),
            "score": float(is_right(answer, sample.answers)),
            "quoted": float(any(_flat(facts["passage"]) in one.text for one in passages)),
            "looped": float(is_loop(llm.session.tokens[llm.n_tokens - n_answer : llm.n_tokens].tolist())),
            "n_tokens": found["usage"]["total_tokens"],
            "tokens_read": llm.session.n_evaluated - before - max(0, n_answer - 1),
            "seconds": round(time.perf_counter() - start, 4),
            **memory(llm),
        }

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the share of right answers, of both halves, of loops, and how often a right answer is quoted right."""
        found = {"score": mean(record["score"] for record in records)}
        for part in PARTS:
            if scores := [record["score"] for record in records if record["part"] == part]:
                found[part] = mean(scores)
        found["looped"] = mean(record["looped"] for record in records)
        if right := [record["quoted"] for record in records if record["score"]]:
            found["quoted"] = mean(right)
        return found

    def cell_text(self, records: Sequence[Record]) -> str:
        """Return all numbers of a table cell."""
        return ", ".join(f"{name} {100 * value:.0f}" for name, value in self.summary(records).items())


def is_right(answer: str, groups: Sequence[str]) -> bool:
    """Return True if of each group of alternatives, parted by ``|``, one begins a word of the answer.

    Examples
    --------
    >>> is_right("A file and some food.", ["file", "wittles|food"]), is_right("Foodless.", ["file"])
    (True, False)
    """
    said = answer.lower()
    return all(
        any(re.search(rf"(?<![^\W_]){re.escape(one.lower())}", said) for one in group.split("|")) for group in groups
    )


def read_texts(path: str) -> list[tuple[list[dict[str, Any]], FileText]]:
    """Return the questions of each text, and the text.

    Raises ValueError when the file is no such list, a text cannot be read, or does not contain a passage.
    """
    found = []
    for i, text in enumerate(check_fields(read_json(path, HINT), {"texts": list}, path)["texts"], 1):
        asked = check_fields(text, TEXT, f"{path}, text {i}")["questions"]
        file = read_file(Path(path).parent / text["file"])
        body, end = file.text, text.get("end")
        if end is not None:
            body, mark, _ = body.partition(f"\n{end}\n")
            if not mark:
                raise ValueError(f"{path}, text {i}: {file.name} has no line {end!r}")
        for j, one in enumerate(asked, 1):
            passage = check_fields(one, QUESTION, f"{path}, text {i}, question {j}")["passage"]
            if _flat(passage) not in _flat(body):
                raise ValueError(f"{path}, text {i}, question {j}: the text does not contain {passage!r}")
        found.append((asked, FileText(Path(text["file"]).name, body)))
    return found


def _flat(text: str) -> str:
    return " ".join(text.split())
