"""RULER's questions among documents: SQuAD and HotpotQA, from the user's files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pylongctx.eval.ruler.sizes import Drawn


@dataclass(frozen=True)
class Asked:
    """A question, its answers, the documents that hold them, and others about the same."""

    query: str
    answers: list[str]
    documents: list[int]
    related: list[int]


def read_squad(data: Any) -> tuple[list[Asked], list[str]]:
    """Return the questions and the documents of SQuAD's JSON; unanswerable ones are left out."""
    documents = sorted({p["context"] for d in data["data"] for p in d["paragraphs"]})
    number = {text: i for i, text in enumerate(documents)}
    asked = []
    for article in data["data"]:
        all_here = [number[p["context"]] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            others = [i for i in all_here if i != own]
            possible = (qa for qa in paragraph["qas"] if not qa.get("is_impossible"))
            asked += [Asked(qa["question"], [a["text"] for a in qa["answers"]], [own], others) for qa in possible]
    return asked, documents


def read_hotpotqa(data: Any) -> tuple[list[Asked], list[str]]:
    """Return the questions and the documents of HotpotQA's JSON."""

    def texts(item: Any) -> list[str]:
        return [f"{title}\n{''.join(lines)}" for title, lines in item["context"]]

    documents = sorted({text for item in data for text in texts(item)})
    number = {text: i for i, text in enumerate(documents)}
    asked = [Asked(item["question"], [item["answer"]], [number[t] for t in texts(item)], []) for item in data]
    return asked, documents


READERS = {"qa_1": read_squad, "qa_2": read_hotpotqa}


class Documents:
    """Draw prompts: question number ``index`` among ``n`` documents."""

    def __init__(self, name: str, prompts: dict[str, Any], seed: int, data: str | None) -> None:
        what = "SQuAD" if name == "qa_1" else "HotpotQA"
        if data is None:
            raise ValueError(f"{name} needs the questions of {what}: --data FILE, its JSON file")
        try:
            self._asked, self._documents = READERS[name](json.loads(Path(data).read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError) as reason:
            raise ValueError(f"{data} is no JSON file of {what}") from reason
        self._template, self._prefix, self._seed = prompts["template"], prompts["answer_prefix"], seed
        self._random = Random(seed)

    def __len__(self) -> int:
        return len(self._asked)

    def step(self, length: int) -> int:
        """Return by how many documents a prompt shrinks."""
        return 10

    def draw(self, index: int, n: int) -> Drawn:
        """Return a prompt; the documents are repeated when there are fewer than ``n``."""
        asked = self._asked[index]
        chosen = [self._documents[i] for i in self._choose(asked, n)] if n < len(self._documents) else self._repeated(n)
        Random(self._seed).shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(chosen, 1))
        return Drawn(self._template.format(context=context, query=asked.query), self._prefix, asked.answers)

    def _choose(self, asked: Asked, n: int) -> list[int]:
        n_more = n - len(asked.documents)
        if n_more <= len(asked.related):
            return asked.documents + self._random.sample(asked.related, max(0, n_more))
        near = {*asked.documents, *asked.related}
        far = [i for i in range(len(self._documents)) if i not in near]
        n_far = max(0, n_more - len(asked.related))
        return asked.documents + asked.related + self._random.sample(far, n_far)

    def _repeated(self, n: int) -> list[str]:
        return (self._documents * -(-n // len(self._documents)))[:n]
