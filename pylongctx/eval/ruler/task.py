"""RULER's tasks as samples of a length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from pylongctx.eval.files import check_fields, published, read_json
from pylongctx.eval.haystack import SYNTHETIC, load_text
from pylongctx.eval.ruler.documents import READERS, DocumentQuestions
from pylongctx.eval.ruler.niah import KINDS, Niah
from pylongctx.eval.ruler.sizes import Drawn, draw_all, largest_size
from pylongctx.eval.ruler.tracking import EXAMPLE_LENGTH, EXAMPLE_STEP, Tracking
from pylongctx.eval.ruler.words import Common, Frequent
from pylongctx.eval.scorers import string_match_all, string_match_part
from pylongctx.eval.task import Answer, Question, Sample, Vocabulary

FAMILIES = {
    **dict.fromkeys(KINDS, "niah"),
    "vt": "variable_tracking",
    "cwe": "common_words_extraction",
    "fwe": "freq_words_extraction",
    **dict.fromkeys(READERS, "qa"),
}
NAMES = tuple(FAMILIES)
ESSAY_CHARACTERS = 650_000  # about what RULER's essays have
CWE_PROBE = 4096

Draw = Callable[[int], Drawn]  # from units of haystack to a prompt


@dataclass(frozen=True)
class Ruler(Question):
    """One of RULER's tasks.

    Attributes
    ----------
    name : str
        One of ``NAMES``.
    tests : int
        Samples; RULER takes 500 and the seed 42.
    data : str or None
        The task's data: essays (text, a folder of texts or RULER's PaulGrahamEssays.json), SQuAD's or HotpotQA's JSON
        for qa_1 and qa_2, english_words.json for cwe.
    """

    headline: ClassVar[str] = "string_match"
    name: str = "niah_single_1"
    tests: int = 500
    data: str | None = None

    def __post_init__(self) -> None:
        if self.name not in FAMILIES:
            raise ValueError(f"RULER has no task {self.name!r}; available: {', '.join(NAMES)}")

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return the samples; the tokens of the answer are part of the length."""
        prompts = published("ruler")[FAMILIES[self.name]]
        sizes = _Sizes(vocabulary, length, prompts["tokens_to_generate"])
        try:
            drawn, exact = self._draw(prompts, sizes, seed)
            found = list(drawn)
        except ValueError as reason:
            raise ValueError(f"{self.name}, length {length}: {reason}") from None
        label = "RULER" if exact() else "RULER-compatible"
        return [self._sample(i, d, length, seed, prompts["tokens_to_generate"], label) for i, d in enumerate(found)]

    def _sample(self, index: int, drawn: Drawn, length: int, seed: int, n: int, label: str) -> Sample:
        prompt = drawn.text.removesuffix(drawn.prefix)
        facts, shared = {"label": label, "index": index}, len(prompt) - len(drawn.question)
        name, answers = f"{length}-{seed}-{index}", tuple(drawn.answers)
        return Sample(name, prompt, drawn.prefix, answers, n, facts=facts, shared=shared)

    def _draw(self, prompts: dict[str, Any], sizes: _Sizes, seed: int) -> tuple[Iterable[Drawn], Callable[[], bool]]:
        """Return the prompts, and what tells afterwards whether they are RULER's own."""
        if self.name in KINDS:
            niah = Niah(KINDS[self.name], prompts, seed, self._essay(seed))
            step, probe = niah.steps(sizes.length)
            return sizes.fitted(niah, step, self.tests, probe=probe), lambda: not self._wants_essay
        if self.name == "vt":
            return self._tracked(Tracking(prompts, seed), sizes), lambda: True
        if self.name == "cwe":
            common = Common(prompts, seed, sizes.length, self.data)
            return self._common(common, sizes), lambda: common.exact
        if self.name == "fwe":
            frequent = Frequent(prompts, seed, sizes.room)
            n_words = frequent.n_words(sizes.of)
            return (frequent.draw(n_words, sizes.of) for _ in range(self.tests)), lambda: True
        documents = DocumentQuestions(self.name, prompts, seed, self.data)
        return self._among_documents(documents, sizes), lambda: documents.exact

    @property
    def _wants_essay(self) -> bool:
        return self.name in KINDS and KINDS[self.name].type_haystack == "essay"

    def _essay(self, seed: int) -> str:
        if not self._wants_essay:
            return ""
        if self.data is not None and self.data.endswith(".json"):
            essays = read_json(self.data, "--data is a text, a folder of texts, or RULER's PaulGrahamEssays.json")
            return str(check_fields(essays, {"text": str}, self.data)["text"])
        return load_text(self.data or SYNTHETIC, ESSAY_CHARACTERS if self.data is None else 1, seed)

    def _tracked(self, tracking: Tracking, sizes: _Sizes) -> Iterator[Drawn]:
        short = _Sizes(sizes.vocabulary, EXAMPLE_LENGTH, 0)
        tracking.solve(next(iter(short.fitted(tracking, EXAMPLE_STEP, 1))))
        n_example = len(sizes.vocabulary.tokenize(tracking.example))
        yield from sizes.fitted(tracking, tracking.step(sizes.length), self.tests, n_example, tracking.shown)

    def _common(self, common: Common, sizes: _Sizes) -> Iterator[Drawn]:
        per_word = sizes.of(common(CWE_PROBE)) / CWE_PROBE
        step = common.step(sizes.length)
        highest = max(int(sizes.most // per_word) * 2, 2 * step)
        n = largest_size(lambda n: sizes.of(common(n)), step, highest, sizes.room)
        yield from draw_all(common, sizes.fits, n, step, self.tests)

    def _among_documents(self, documents: DocumentQuestions, sizes: _Sizes) -> Iterator[Drawn]:
        if self.tests > len(documents):
            raise ValueError(f"--data has {len(documents)} questions, not {self.tests}")
        step = documents.step(sizes.length)
        n = sizes.units(partial(documents.draw, 0), step)
        for index in range(self.tests):
            yield from draw_all(partial(documents.draw, index), sizes.fits, n, step, 1)

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return the score of RULER: the share of the answers found, or for questions whether one is."""
        match = string_match_part if FAMILIES[self.name] == "qa" else string_match_all
        return {"string_match": round(match(answer.text, sample.answers), 4)}


class _Sizes:
    """The lengths of prompts, in tokens."""

    def __init__(self, vocabulary: Vocabulary, length: int, n_answer: int) -> None:
        self.vocabulary, self.length = vocabulary, length
        self.most = length - vocabulary.overhead
        self.room = self.most - n_answer

    def of(self, drawn: Drawn) -> int:
        """Return the tokens of a prompt without BOS and chat template."""
        return len(self.vocabulary.tokenize(drawn.text))

    def fits(self, drawn: Drawn) -> bool:
        """Return whether a prompt leaves room for the answer."""
        return self.of(drawn) <= self.room

    def units(self, draw: Draw, step: int, n_shown: int = 0, probe: int = 0) -> int:
        """Return how many units of haystack to begin with; ``n_shown`` tokens stand before."""
        probe = probe or step
        per_unit = self.of(draw(probe)) / probe
        highest = max(int(self.most / per_unit * 3), 2 * step)
        return largest_size(lambda n: self.of(draw(n)), step, highest, self.room - n_shown)

    def fitted(
        self, draw: Draw, step: int, n: int, n_shown: int = 0, last: Draw | None = None, probe: int = 0
    ) -> Iterator[Drawn]:
        """Yield ``n`` prompts of the largest size; ``last`` draws them, where the search does it another way."""
        n_units = self.units(draw, step, n_shown, probe)
        yield from draw_all(last or draw, self.fits, n_units, step, n)
