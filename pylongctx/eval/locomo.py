"""LoCoMo (arXiv 2402.17753): many questions on one chat over months, from the user's files.

Prompts, the part of the chat that is kept and the scores are those of task_eval/evaluate_llama2.py and evaluation.py in
https://github.com/snap-research/locomo. Other than there, all questions on a chat have the same part of it, which the
longest question leaves room for, so that it can be read once.
"""

from __future__ import annotations

import json
import re
import string
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from pylongctx.eval.files import Kind, check_fields, published, read_json, stem
from pylongctx.eval.fitting import MARGIN, largest_fit
from pylongctx.eval.scorers import mean, package, token_f1
from pylongctx.eval.task import Answer, FileQuestion, Record, Sample, Vocabulary

HINT = "--data is locomo10.zip, a folder of its files, or one file"
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
ASKED: dict[str, Kind] = {"question": str, "category": int}
SAID: dict[str, Kind] = {"speaker": str, "text": str}
ARTICLES = re.compile(r"\b(a|an|the|and)\b")


@dataclass(frozen=True)
class LoCoMo(FileQuestion):
    """Answer questions about a long chat, of which the last turns are kept where all do not fit.

    Attributes
    ----------
    data : str
        ``locomo10.zip``, a folder of its files, or one of them.
    tests : int or None
        The number of questions, evenly spread over chats and categories; None: all.
    category : str
        Only the questions of one category, a value of ``CATEGORIES``; "" for all.
    chats : int or None
        Only this number of chats, the first ones. None: all.

    Examples
    --------
    >>> LoCoMo("locomo10.zip", category="temporal").name
    'locomo-temporal'
    """

    category: str = ""
    chats: int | None = None

    def __post_init__(self) -> None:
        if self.category not in ("", *CATEGORIES.values()):
            raise ValueError(f"category is one of {', '.join(CATEGORIES.values())}, not {self.category!r}")

    @property
    def name(self) -> str:
        """The benchmark, and the category that is chosen."""
        return "locomo" + f"-{self.category}" * bool(self.category)

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per question; the seed orders the choices of adversarial ones."""
        found: list[Sample] = []
        for name, chat in [*read_chats(self.data).items()][: self.chats]:
            asked = [
                self._sample(f"{length}-{seed}-{name}-{j}", qa, seed)
                for j, qa in enumerate(chat.asked)
                if self.category in ("", CATEGORIES[qa["category"]])
            ]
            found += kept(vocabulary, chat, asked, length) if asked else []
        n = len(found) if self.tests is None else min(self.tests, len(found))
        return [found[i * len(found) // n] for i in range(n)]

    def _sample(self, name: str, qa: dict[str, Any], seed: int) -> Sample:
        """Return the sample of a question, without the chat."""
        texts, category = published("locomo")["locomo"], CATEGORIES[qa["category"]]
        facts: dict[str, Any] = {"category": category}
        question, answer = qa["question"], str(qa.get("answer", ""))
        if category == "temporal":
            question += texts["temporal"]
        if category == "open-domain":
            answer = answer.split(";")[0].strip()
        if category == "adversarial":
            choices = [texts["unknown"], str(qa.get("adversarial_answer", answer))]
            if Random(f"{name}-{seed}").random() < 0.5:
                choices.reverse()
            question += texts["adversarial"].format(*choices)
            facts["right"], answer = "(a)" if choices[0] == texts["unknown"] else "(b)", texts["unknown"]
        n = self.max_tokens or texts["max_tokens"]
        return Sample(name, texts["prompt"].format(question), answers=(answer,), max_tokens=n, facts=facts)

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return the F1 of word stems, or for an adversarial question whether the answer is that nothing is known."""
        said = answer.text.strip().split("\n")[0].lower().strip()
        if sample.facts["category"] == "adversarial":
            return {"score": float(("(a)" in said) == (sample.facts["right"] == "(a)"))}
        for mark in ("(a)", "(b)", "a)", "b)", "answer:"):
            said = said.replace(mark, "")
        if sample.facts["category"] == "multi-hop":
            return {"score": round(many_f1(said.strip(), sample.answers[0]), 6)}
        return {"score": round(stem_f1(said.strip(), sample.answers[0]), 6)}

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the mean score, and that of every category."""
        found = super().summary(records)
        for name in CATEGORIES.values():
            if scores := [record["score"] for record in records if record["category"] == name]:
                found[name] = mean(scores)
        return found


# ---- chats ----


@dataclass(frozen=True)
class LongChat:
    """A chat and the questions about it.

    Attributes
    ----------
    start : str
        What the prompt says of it first.
    turns : list of tuple of str
        Heading of the session, and what is said.
    asked : list of dict
        Questions.
    """

    start: str
    turns: list[tuple[str, str]]
    asked: list[dict[str, Any]]

    def last(self, n: int) -> str:
        """Return the last ``n`` turns, each session with its heading."""
        parts, heading = [self.start], ""
        for session, turn in self.turns[len(self.turns) - n :]:
            parts += [session, turn] if session != heading else [turn]
            heading = session
        return "".join(parts)


def read_chats(path: str) -> dict[str, LongChat]:
    """Return the chats of a zip archive, a folder or a file by their names.

    Raises
    ------
    ValueError
        When there is no such file, or a field is missing; names the chat and the field.
    """
    file = Path(path)
    if file.suffix == ".zip" and file.is_file():
        with zipfile.ZipFile(file) as archive:
            names = [name for name in sorted(archive.namelist()) if name.endswith(".json")]
            items = {stem(name): json.loads(archive.read(name)) for name in names}
    elif file.is_dir():
        items = {one.stem: read_json(one, HINT) for one in sorted(file.glob("*.json"))}
    else:
        value = read_json(file, HINT)
        items = {str(i): item for i, item in enumerate(value)} if isinstance(value, list) else {file.stem: value}
    if not items:
        raise ValueError(f"{path} holds no .json files; {HINT}")
    return {name: _chat(item, f"{path}, chat {name}") for name, item in items.items()}


def _chat(item: Any, where: str) -> LongChat:
    asked = check_fields(item, {"qa": list}, where)["qa"]
    for i, qa in enumerate(asked, 1):
        category = check_fields(qa, ASKED, f"{where}, question {i}")["category"]
        answer = "adversarial_answer" if category == 5 else "answer"
        if category not in CATEGORIES or not qa.keys() & {"answer", answer}:
            raise ValueError(f"{where}, question {i}: it has no {answer!r}, or its category is not from 1 to 5")
    talk = check_fields(item.get("conversation", item), {"speaker_a": str, "speaker_b": str}, where)
    texts, turns = published("locomo")["locomo"], []
    for i in sorted(int(key[8:]) for key in talk if re.fullmatch(r"session_\d+", key)):
        session, date = f"session_{i}", f"session_{i}_date_time"
        heading = texts["session"].format(check_fields(talk, {session: list, date: str}, where)[date])
        for said in talk[session]:
            check_fields(said, SAID, f"{where}, {session}")
            shared = f" [shares {said['blip_caption']}]" if said.get("blip_caption") else ""
            turns.append((heading, f'{said["speaker"]} said, "{said["text"]}"{shared}\n'))
    return LongChat(texts["start"].format(talk["speaker_a"], talk["speaker_b"]), turns, asked)


def kept(vocabulary: Vocabulary, chat: LongChat, asked: Sequence[Sample], length: int) -> list[Sample]:
    """Return questions after as many of the last turns of a chat as leave room for each of them.

    Raises
    ------
    ValueError
        When there is no room for a turn.
    """
    n_fixed = max(len(vocabulary.tokens(sample)) + sample.max_tokens for sample in asked) + MARGIN
    room, n_turns = length - n_fixed, len(chat.turns)

    def fits(n: int) -> bool:
        return n <= n_turns and len(vocabulary.tokenize(chat.last(n))) <= room

    if not fits(1):
        raise ValueError(f"locomo, length {length}: question, answer and one turn need more; ask for a greater length")
    n = n_turns if fits(n_turns) else largest_fit(fits, n_turns // 2)
    text = chat.last(n)
    found = []
    for sample in asked:
        facts = {**sample.facts, "turns": n, "turns_of_chat": n_turns}
        found.append(replace(sample, prompt=text + str(sample.prompt), shared=len(text), facts=facts))
    return found


# ---- scores ----


@cache
def _stemmer() -> Any:
    return package("nltk.stem").PorterStemmer()


def _stems(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return [_stemmer().stem(word) for word in ARTICLES.sub(" ", bare).split()]


def stem_f1(prediction: str, answer: str) -> float:
    """Return the F1 of word stems, without articles and punctuation; stems are those of nltk's PorterStemmer.

    Examples
    --------
    >>> stem_f1("She painted", "painting")
    0.6666666666666666
    """
    return token_f1(_stems(prediction), _stems(answer))


def many_f1(prediction: str, answer: str) -> float:
    """Return the mean over the answers, which commas part, of the best F1 of a part of the prediction.

    Examples
    --------
    >>> many_f1("a cat, a dog", "dogs, birds")
    0.5
    """
    said = prediction.split(",")
    return mean(max(stem_f1(part, wanted) for part in said) for wanted in answer.split(","))
