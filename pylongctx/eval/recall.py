"""Facts hidden in a novel, several questions on one text: each continues from the text, which is evaluated once.

A method that stores less, or chooses what it reads, has stored the text before it knows the question. The facts are
asked for in their own words, in other words, or among similar ones, see ``pylongctx.eval.haystack``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from pylongctx.eval.haystack import N_PER_TOKEN, SYNTHETIC, Stated, draw_facts, load_text
from pylongctx.eval.needle import hidden
from pylongctx.eval.perplexity import nll_of, token_nll
from pylongctx.eval.scorers import mean, string_match_part
from pylongctx.eval.task import (
    REPLAY,
    Answer,
    Record,
    Sample,
    SingleModel,
    Vocabulary,
    greedy,
    is_for_one_question,
    memory,
    why_no_compression,
)
from pylongctx.llama import Llama
from pylongctx.methods import Method
from pylongctx.methods.base import check_share

ASKED = {"number": "recall", "literal": "recall-names", "paraphrase": "recall-paraphrased"}  # and names of tasks
INTRO = "Some facts are hidden in the following text. Remember them. I will ask for them afterwards.\n\n"


@dataclass(frozen=True)
class Recall(SingleModel):
    """Answer several questions on one text.

    Attributes
    ----------
    asked : str
        "number": what is the code of the mill? "literal": who speaks Portuguese? "paraphrase": who could work in
        Brazil?
    tests : int
        Texts.
    questions : int
        Facts in a text, evenly spread, the middle of the text included when they are odd; each is asked for.
    decoys : int
        Similar sentences for each fact, spread at random.
    haystack : str or tuple of str
        "synthetic", a text file or a folder of them; several take turns, text by text.
    fresh : int
        Questions of a text that are answered from an empty cache too, for a comparison.
    scored : int
        Tokens at the end of the text whose perplexity is recorded: the same reading serves for both.
    compress : float
        Share of the text's rows that ``Llama.compress`` leaves before the questions, 1 for no compression; for a method
        with the rule kvzip, or with snapkv, which compresses text and question together.

    Examples
    --------
    >>> from pylongctx.eval.runner import Cell, run
    >>> (record,) = run(Cell("model.gguf", "longheads", Recall(tests=1, questions=3, fresh=1), length=1024))
    >>> len(record["turns"]), record["n_fresh"], record["n_evaluated"] < 2 * record["n_tokens"]
    (3, 1, True)
    """

    asked: str = "number"
    tests: int = 4
    questions: int = 5
    decoys: int = 0
    haystack: str | tuple[str, ...] = SYNTHETIC
    fresh: int = 0
    scored: int = 0
    compress: float = 1.0
    max_tokens: int = 12

    def __post_init__(self) -> None:
        if self.asked not in ASKED:
            raise ValueError(f"facts are not asked for as {self.asked!r}; available: {', '.join(ASKED)}")
        if min(self.tests, self.questions) < 1 or min(self.decoys, self.fresh, self.scored) < 0:
            raise ValueError("tests and questions must be at least 1; decoys, fresh and scored must be at least 0")
        check_share("compress", self.compress)

    @property
    def name(self) -> str:
        """The kind of questions, and how much of a text is left."""
        return self.kind + f"-compressed-{self.compress:g}" * (self.compress < 1)

    @property
    def kind(self) -> str:
        """The kind of questions; texts and facts follow from it, whether or not the text is compressed."""
        return ASKED[self.asked] + f"-{self.decoys}-decoys" * bool(self.decoys)

    @property
    def settings(self) -> Record:
        """Settings that a record depends on in addition to its sample."""
        compress = {"compress": self.compress} if self.compress < 1 else {}
        return {"asked": self.asked, "fresh": self.fresh} | ({"scored": self.scored} if self.scored else {}) | compress

    def refusal(self, method: Method | None) -> str:
        """Refuse to compress where no rule waits for it."""
        return why_no_compression(method) if self.compress < 1 else ""

    def n_ctx(self, vocabulary: Vocabulary, samples: Sequence[Sample], length: int) -> int:
        """Return the length, and where a text is compressed the room of its replay."""
        return length + (REPLAY if self.compress < 1 else 0)

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per text."""
        if vocabulary.overhead != len(vocabulary.bos):
            raise ValueError("several questions on one text have no chat template; leave --chat out")
        names = (self.haystack,) if isinstance(self.haystack, str) else self.haystack
        if not names:
            raise ValueError("haystack names no text")
        texts = [load_text(name, (1 + self.tests) * length * N_PER_TOKEN, seed) for name in names]
        several = [{"haystack": Path(name).stem} if len(names) > 1 else {} for name in names]
        return [
            self._sample(vocabulary, texts[i % len(texts)], several[i % len(texts)], length, seed, i)
            for i in range(self.tests)
        ]

    def _sample(self, vocabulary: Vocabulary, text: str, named: Record, length: int, seed: int, trial: int) -> Sample:
        random = Random(f"{self.kind}-{seed}-{length}-{trial}")
        facts = draw_facts(self.questions, self.asked, self.decoys, random)
        asked = [f"\n\nQuestion: {fact.question}\nAnswer:{fact.prefix}" for fact in facts]
        depths = [(i + 0.5) / self.questions for i in range(self.questions)]
        sentences = [*zip(depths, (fact.text for fact in facts), strict=True), *self._decoys(facts, random)]
        pieces = [(100 * depth, vocabulary.tokenize(f" {sentence} ")) for depth, sentence in sorted(sentences)]
        intro = [*vocabulary.bos, *vocabulary.tokenize(INTRO)]
        n_asked = max(len(vocabulary.tokenize(question)) for question in asked)
        room = length - len(intro) - sum(len(piece) for _, piece in pieces) - n_asked - self.max_tokens
        if room <= self.scored:
            raise ValueError(
                f"{self.name}, length {length}: facts, questions and what is scored need {length - room} tokens"
            )
        tokens = [*intro, *hidden(vocabulary, self._cut(vocabulary, text, room, trial), pieces)[0]]
        turns = [
            {"question": question, "answer": fact.answer, "depth_percent": round(100 * depth, 2)}
            for question, fact, depth in zip(asked, facts, depths, strict=True)
        ]
        return Sample(
            f"{length}-{seed}-{trial}",
            np.array(tokens, np.int32),
            answers=tuple(fact.answer for fact in facts),
            max_tokens=self.max_tokens,
            stop=("\n",),
            facts={"trial": trial, "turns": turns, **named},
        )

    def _decoys(self, facts: Sequence[Stated], random: Random) -> list[tuple[float, str]]:
        return [(random.random(), sentence) for fact in facts for sentence in fact.decoys]

    def _cut(self, vocabulary: Vocabulary, text: str, n: int, trial: int) -> list[int]:
        """Return ``n`` tokens of the haystack, of another part of it for every trial."""
        start = (len(text) - n * N_PER_TOKEN) * trial // max(1, self.tests)
        size, tokens = n * N_PER_TOKEN, list[int]()
        while len(tokens) < n:
            tokens, size = vocabulary.tokenize((text + text)[start : start + size]), 2 * size
        return tokens[:n]

    def run(self, llm: Llama, vocabulary: Vocabulary, sample: Sample) -> Record:
        """Return the share of right answers, the answers, and how many tokens were evaluated for them."""
        assert not isinstance(sample.prompt, str)
        turns, text = sample.facts["turns"], sample.prompt.tolist()
        prompts = [np.array([*text, *vocabulary.tokenize(turn["question"])], np.int32) for turn in turns]
        expected = [vocabulary.tokenize(f" {turn['answer']}") for turn in turns]
        start, before = time.perf_counter(), llm.session.n_evaluated
        likelihood = self._read(llm, sample.prompt)
        if self.compress < 1 and not is_for_one_question(llm):
            llm.compress(self.compress)
        read = time.perf_counter() - start
        ratio = self.compress if is_for_one_question(llm) else 1.0
        answers, logprobs = zip(*_branches(llm, prompts, expected, sample, ratio), strict=True)
        seconds, n_evaluated = time.perf_counter() - start, llm.session.n_evaluated - before
        held = memory(llm)
        fresh = [greedy(llm, prompt, sample)[0] for prompt in prompts[: self.fresh]]
        right = [string_match_part(answer.text, [turn["answer"]]) for answer, turn in zip(answers, turns, strict=True)]
        said = zip(turns, answers, right, logprobs, strict=True)
        return {
            **sample.facts,
            "score": mean(right),
            "turns": [
                turn | {"said": answer.text, "right": score, "logprob": round(logprob, 4)}
                for turn, answer, score, logprob in said
            ],
            "n_tokens": max(map(len, prompts)) + sample.max_tokens,
            "n_evaluated": n_evaluated,
            "n_fresh": len(fresh),
            "n_same": sum(a.tokens == b.tokens for a, b in zip(answers, fresh, strict=False)),
            "seconds": round(seconds, 4),
            "prompt_per_second": round(len(text) / read, 2),
            **likelihood,
            **held,
        }

    def _read(self, llm: Llama, text: NDArray[np.int32]) -> Record:
        """Evaluate the text; returns the likelihood of its last tokens as ``Perplexity`` has it."""
        llm.reset()
        if not self.scored:
            llm.eval(text.tolist())
            return {}
        values = token_nll(llm, text, len(text) - self.scored - 1)
        llm.eval(text[-1:].tolist())
        facts = {"mode": f"end of {self.name}", "stride": self.scored, "n_scored": self.scored}
        return facts | {"nll": float(values.sum()), "nll2": float((values**2).sum())}

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the mean score, that of every depth, and how often a fresh prefill gives the same answer.

        ``logprob`` is the mean log-probability of the right answers: it distinguishes methods that find few facts.
        """
        turns = [turn for record in records for turn in record["turns"]]
        depths = sorted({turn["depth_percent"] for turn in turns})
        found = {"score": mean(turn["right"] for turn in turns)}
        if all("logprob" in turn for turn in turns):
            found["logprob"] = mean(turn["logprob"] for turn in turns)
        found |= {f"depth {d:g}": mean(t["right"] for t in turns if t["depth_percent"] == d) for d in depths}
        n_fresh = sum(record.get("n_fresh", 0) for record in records)
        return found | ({"same": sum(record["n_same"] for record in records) / n_fresh} if n_fresh else {})


def _branches(
    llm: Llama, prompts: Sequence[NDArray[np.int32]], expected: Sequence[Sequence[int]], sample: Sample, ratio: float
) -> Iterator[tuple[Answer, float]]:
    """Answer prompts that begin with the evaluated text, each from there; and the log-probability of what is right.

    With a ratio below 1 each prompt is compressed to it, for its question.
    """
    evicts = llm.method is not None and llm.method.eviction is not None
    state = llm.save_state() if evicts else None  # a question cannot be cut off again: what is evicted is gone
    for prompt, right in zip(prompts, expected, strict=True):
        if state is not None:
            llm.load_state(state)
        if ratio < 1:
            llm.prefill(prompt.tolist())
            llm.compress(ratio)
            prompt_state = llm.save_state()
        logprob = _logprob(llm, prompt, right)
        if state is not None:
            llm.load_state(prompt_state if ratio < 1 else state)
        yield greedy(llm, prompt, sample, fresh=False)[0], logprob


def _logprob(llm: Llama, prompt: NDArray[np.int32], answer: Sequence[int]) -> float:
    """Return the log-probability of an answer after a prompt, of which the cache has the beginning."""
    tokens, at = np.array(answer, np.int32), 1
    llm.prefill(prompt.tolist())
    nll = float(nll_of(llm, llm.session.last_logits[None], tokens[:1]).sum())
    for logits in llm.eval_rows(tokens[:-1].tolist()) if len(tokens) > 1 else ():
        nll += float(nll_of(llm, logits, tokens[at : at + len(logits)]).sum())
        at += len(logits)
    return -nll
