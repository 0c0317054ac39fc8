"""RULER's questions among documents: SQuAD and HotpotQA, from the user's files."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from pylongctx.eval.files import after_context, check_fields, read_json
from pylongctx.eval.ruler.sizes import Drawn

N_PUBLISHED = {"qa_1": 5928, "qa_2": 7405}  # questions in RULER's own files: of SQuAD 2.0 dev, of HotpotQA dev


@dataclass(frozen=True)
class Asked:
    """A question, its answers, the documents that hold them, and others about the same."""

    query: str
    answers: list[str]
    documents: list[int]
    related: list[int]


def read_squad(data: Any, file: str) -> tuple[list[Asked], list[str]]:
    """Return the questions and the documents of SQuAD's JSON; unanswerable ones are left out."""
    articles = check_fields(data, {"data": list}, file)["data"]
    for i, article in enumerate(articles, 1):
        for paragraph in check_fields(article, {"paragraphs": list}, f"{file}, article {i}")["paragraphs"]:
            for qa in check_fields(paragraph, {"context": str, "qas": list}, f"{file}, article {i}")["qas"]:
                check_fields(qa, {"question": str, "answers": list}, f"{file}, article {i}, a question")
    documents = sorted({p["context"] for d in articles for p in d["paragraphs"]})
    number = {text: i for i, text in enumerate(documents)}
    asked = []
    for article in articles:
        all_here = [number[p["context"]] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            others = [i for i in all_here if i != own]
            possible = (qa for qa in paragraph["qas"] if not qa.get("is_impossible"))
            asked += [Asked(qa["question"], [a["text"] for a in qa["answers"]], [own], others) for qa in possible]
    return asked, documents


def read_hotpotqa(data: Any, file: str) -> tuple[list[Asked], list[str]]:
    """Return the questions and the documents of HotpotQA's JSON, in its own form or in that of the QuALITY demo."""
    if not isinstance(data, list):
        raise ValueError(f"{file} is not a list of questions")
    items = [(_contexts(item, f"{file}, item {i}"), item) for i, item in enumerate(data, 1)]
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in contexts] for contexts, _ in items]
    documents = sorted({text for one in texts for text in one})
    number = {text: i for i, text in enumerate(documents)}
    pairs = zip(texts, items, strict=True)
    return [
        Asked(item["question"], [item["answer"]], [number[t] for t in one], []) for one, (_, item) in pairs
    ], documents


def _contexts(item: Any, where: str) -> list[Any]:
    """Return titles and sentences of an item: of "context", or of "title_a", "para_a", ... and "distractors"."""
    check_fields(item, {"question": str, "answer": str}, where)
    if "title_a" in item:
        pairs = dict.fromkeys(("title_a", "title_b"), str) | dict.fromkeys(("para_a", "para_b", "distractors"), list)
        check_fields(item, pairs, where)
        pair = [(item["title_a"], item["para_a"]), (item["title_b"], item["para_b"])]
        return [*pair, *(distractor[:2] for distractor in item["distractors"])]  # the third is a score
    found: list[Any] = check_fields(item, {"context": list}, where)["context"]
    return found


READERS = {"qa_1": read_squad, "qa_2": read_hotpotqa}


class DocumentQuestions:
    """Draw prompts: question number ``index`` among ``n`` documents."""

    def __init__(self, name: str, prompts: dict[str, Any], seed: int, data: str | None) -> None:
        what = "SQuAD" if name == "qa_1" else "HotpotQA"
        if data is None:
            raise ValueError(f"{name} needs the questions of {what}: --data FILE, its JSON file")
        self._asked, self._documents = READERS[name](read_json(data, f"--data is a JSON file of {what}"), data)
        self.exact = len(self._asked) == N_PUBLISHED[name]
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
        question = after_context(self._template).format(query=asked.query)
        prompt = self._template.format(context=context, query=asked.query)
        return Drawn(prompt, self._prefix, asked.answers, question)

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
