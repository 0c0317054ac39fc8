"""Needle in a haystack: one sentence in a long text, over a grid of context lengths and depths.

Options, trimming and insertion are those of gkamradt's LLMTest_NeedleInAHaystack; the judge is not a model but words:
their overlap with the expected answer, ROUGE-L, or a match. ``passkey`` as a needle is LongHeads' figure 7.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from pylongctx.eval.haystack import N_PER_TOKEN, SYNTHETIC, load_text
from pylongctx.eval.scorers import exact_match, mean, rouge_l, string_match_part, word_overlap
from pylongctx.eval.task import Answer, Question, Record, Sample, Vocabulary

SCORERS = {"overlap": word_overlap, "match": string_match_part, "exact": exact_match, "rouge": rouge_l}
COLORS = ("#f0496e", "#ebb839", "#0cd79f")  # of the published heat maps: not found, partly, found
BEST_THINGS = {  # decoys of the default needle
    "Boston": "fly a kite and walk along the harbour on a windy day",
    "Chicago": "rent a boat and look at the towers from the river at night",
    "Denver": "take the first train and ski in the mountains until noon",
    "Houston": "visit the rockets and cool off in the tunnels at lunch",
    "Miami": "swim before breakfast and dance at the beach after dark",
    "New Orleans": "follow a brass band and taste the oysters in a courtyard",
    "Phoenix": "climb a red hill and count the cactuses at sunrise",
    "Seattle": "drink a coffee and watch the ferries leave in the rain",
}
OTHER_KEYS = ("attic", "cellar", "door", "garage", "garden", "gate", "office", "safe")


@dataclass(frozen=True)
class Needle(Question):
    """Answer a question about one sentence of a long text.

    Attributes
    ----------
    depth_percents : tuple of float
        Where the needle is put, 0 to 100, see ``depth_grid``.
    needle, retrieval_question, expected : str
        Texts; ``{key}`` stands for five random digits.
    prefix : str
        What the answer begins with.
    haystack : str
        "synthetic", a text file or a folder of them.
    final_context_length_buffer : int
        Tokens of the length that are left to question and answer.
    tests : int
        Samples of each depth.
    scorer : str
        The score that counts, a name in ``SCORERS``.
    decoys : int
        Sentences of the same form about something else, at random places: an answer with what they say is wrong.
    decoy_texts : tuple of tuple of str
        Each decoy and what it says, as ``needle`` and ``expected`` do; ``{key}`` is another number in each.

    Examples
    --------
    >>> task = Needle((0, 50, 100), final_context_length_buffer=80, max_tokens=8, **PASSKEY)
    >>> task.retrieval_question
    'What is the pass key?'
    """

    depth_percents: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    needle: str = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
    retrieval_question: str = "What is the best thing to do in San Francisco?"
    expected: str = "eat a sandwich and sit in Dolores Park on a sunny day"
    prefix: str = "\nAnswer:"
    haystack: str = SYNTHETIC
    final_context_length_buffer: int = 200
    max_tokens: int = 48
    tests: int = 1
    scorer: str = "overlap"
    decoys: int = 0
    decoy_texts: tuple[tuple[str, str], ...] = tuple(
        (f"\nThe best thing to do in {city} is {thing}.\n", thing) for city, thing in BEST_THINGS.items()
    )

    def __post_init__(self) -> None:
        if self.scorer not in SCORERS:
            raise ValueError(f"unknown scorer {self.scorer!r}; available: {', '.join(SCORERS)}")
        if not all(0 <= depth <= 100 for depth in self.depth_percents):
            raise ValueError("depth percents must be from 0 to 100")
        if not 0 <= self.decoys <= len(self.decoy_texts):
            raise ValueError(f"decoys must be from 0 to {len(self.decoy_texts)}, the number of decoy_texts")

    @property
    def name(self) -> str:
        """The task, and the number of decoys."""
        return "needle" + f"-{self.decoys}-decoys" * bool(self.decoys)

    @property
    def settings(self) -> Record:
        """The score that counts."""
        return {"scorer": self.scorer}

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return the samples of every depth."""
        context = self._context(vocabulary, length, seed)
        grid = [(depth, trial) for depth in self.depth_percents for trial in range(self.tests)]
        return [self._sample(vocabulary, context, length, seed, trial, depth) for depth, trial in grid]

    def _context(self, vocabulary: Vocabulary, n: int, seed: int) -> list[int]:
        """Return the first ``n`` tokens of the haystack."""
        n_characters, tokens = 0, list[int]()
        while len(tokens) < n:
            n_characters += n * N_PER_TOKEN
            tokens = vocabulary.tokenize(load_text(self.haystack, n_characters, seed))
        return tokens[:n]

    def _sample(
        self, vocabulary: Vocabulary, context: list[int], length: int, seed: int, trial: int, depth: float
    ) -> Sample:
        drawn = f"{seed}-{length}-{depth}-{trial}"
        key = Random(drawn).randint(10000, 99999)
        pieces = [(depth, vocabulary.tokenize(self.needle.format(key=key)))]
        decoys = list(self._decoys(key, Random(f"decoys-{drawn}")))
        pieces += [(at, vocabulary.tokenize(sentence)) for at, sentence, _ in decoys]
        room = length - self.final_context_length_buffer
        kept = context[: max(0, room - sum(len(piece) for _, piece in pieces))]
        tokens, places = hidden(vocabulary, kept, pieces)
        text = vocabulary.detokenize(tokens) + "\n\n"
        name = f"{length}-{seed}-{depth:g}-{trial}"
        sample = Sample(
            name,
            f"{text}Question: {self.retrieval_question}",
            prefix=self.prefix,
            answers=(self.expected.format(key=key),),
            max_tokens=self.max_tokens,
            shared=len(text),
            facts={
                "depth_percent": float(depth),
                "trial": trial,
                "needle_token": len(vocabulary.bos) + places[0],
                **({"decoys": [said for _, _, said in decoys]} if decoys else {}),
            },
        )
        n_tokens = len(vocabulary.tokens(sample)) + self.max_tokens
        if n_tokens > length:
            raise ValueError(
                f"length {length}: question and answer need {n_tokens - length} tokens more than the buffer of"
                f" {self.final_context_length_buffer}; enlarge --final-context-length-buffer"
            )
        if not kept:
            raise ValueError(
                f"length {length} leaves no room for a haystack; make --final-context-length-buffer smaller"
            )
        return sample

    def _decoys(self, key: int, random: Random) -> Iterator[tuple[float, str, str]]:
        """Yield depth in percent, sentence and answer of every decoy."""
        keys = random.sample([n for n in range(10000, 100000) if n != key], self.decoys) if self.decoys else []
        for other, (sentence, said) in zip(keys, random.sample(self.decoy_texts, self.decoys), strict=True):
            yield 100 * random.random(), sentence.format(key=other), said.format(key=other)

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return ``score``, the one that counts, and those that need no package.

        Each is 0 for an answer that is as near to a decoy as to the needle.
        """
        names = {self.scorer, *SCORERS} - ({"rouge"} - {self.scorer})
        decoys: Sequence[str] = sample.facts.get("decoys", ())

        def one(name: str) -> float:
            found = SCORERS[name](answer.text, sample.answers)
            return found if all(found > SCORERS[name](answer.text, [decoy]) for decoy in decoys) else 0.0

        found = {name: round(one(name), 4) for name in sorted(names)}
        return {"score": found[self.scorer]} | found

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the mean score, and that of every depth as ``depth N``."""
        depths = sorted({record["depth_percent"] for record in records})
        by_depth = {d: mean(r["score"] for r in records if r["depth_percent"] == d) for d in depths}
        return {"score": mean(r["score"] for r in records)} | {f"depth {d:g}": value for d, value in by_depth.items()}


# LongHeads, figure 7: the pass key in other text
PASSKEY = {
    "needle": " The pass key is {key}. Remember it. {key} is the pass key. ",
    "retrieval_question": "What is the pass key?",
    "expected": "{key}",
    "prefix": " The pass key is",
    "scorer": "match",
    "decoy_texts": tuple(
        (f" The {name} key is {{key}}. Remember it. {{key}} is the {name} key. ", "{key}") for name in OTHER_KEYS
    ),
}


def hidden(
    vocabulary: Vocabulary, body: Sequence[int], pieces: Sequence[tuple[float, Sequence[int]]]
) -> tuple[list[int], list[int]]:
    """Return a text with pieces at their depths, each at the end of a sentence, and the place of every piece.

    Parameters
    ----------
    pieces : sequence of tuple
        Depth in percent, and tokens.

    Examples
    --------
    >>> from pylongctx.eval.task import ModelVocabulary
    >>> vocabulary = ModelVocabulary(llm)
    >>> found, places = hidden(vocabulary, vocabulary.tokenize("It rained. He slept."), [(50, [7, 8])])
    >>> found[places[0] : places[0] + 2]
    [7, 8]
    """
    tokens, start, places = list[int](), 0, [0] * len(pieces)
    for number in sorted(range(len(pieces)), key=lambda i: pieces[i][0]):
        depth, piece = pieces[number]
        end = max(start, insertion_point(vocabulary, body, depth))
        tokens += body[start:end]
        places[number] = len(tokens)
        tokens += piece
        start = end
    return [*tokens, *body[start:]], places


def insertion_point(vocabulary: Vocabulary, tokens: Sequence[int], depth_percent: float) -> int:
    """Return the position of a needle: the depth, moved back to the end of a sentence; 100 is the end itself.

    Examples
    --------
    >>> from pylongctx.eval.task import ModelVocabulary
    >>> vocabulary = ModelVocabulary(llm)
    >>> words = vocabulary.tokenize("It rained. She slept. He went out.")
    >>> vocabulary.detokenize(words[: insertion_point(vocabulary, words, 50)])
    'It rained.'
    """
    if depth_percent == 100:
        return len(tokens)
    at = int(len(tokens) * (depth_percent / 100))
    while at > 0 and not vocabulary.detokenize(tokens[at - 1 : at]).endswith("."):
        at -= 1
    return at


def context_lengths(lowest: int, highest: int, n: int) -> list[int]:
    """Return ``n`` evenly spread lengths.

    Examples
    --------
    >>> context_lengths(1000, 16000, 4)
    [1000, 6000, 11000, 16000]
    """
    return [int(length) for length in np.round(np.linspace(lowest, highest, n))]


def depth_grid(lowest: float, highest: float, n: int, kind: str) -> tuple[float, ...]:
    """Return ``n`` depths in percent: "linear", whole numbers, or "sigmoid", denser at both ends.

    Examples
    --------
    >>> depth_grid(0, 100, 5, "linear")
    (0.0, 25.0, 50.0, 75.0, 100.0)
    >>> depth_grid(0, 100, 5, "sigmoid")
    (0.0, 7.586, 50.0, 92.414, 100.0)
    """
    spread = np.linspace(lowest, highest, n)
    if kind == "linear":
        return tuple(float(depth) for depth in np.round(spread))
    if kind == "sigmoid":
        return tuple(_logistic(float(depth)) for depth in spread)
    raise ValueError(f"depths are spread 'linear' or 'sigmoid', not {kind!r}")


def _logistic(depth: float) -> float:
    return depth if depth in (0, 100) else float(np.round(100 / (1 + np.exp(-0.1 * (depth - 50))), 3))
