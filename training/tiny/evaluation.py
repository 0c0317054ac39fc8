"""What is measured while a model trains: perplexity of held-out text, pass keys by depth."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from pylongctx.eval.haystack import SENTENCES, Haystack
from pylongctx.eval.passkey import INTRO, make_prompt
from tiny.data import ANSWER_WEIGHT, Corpus, Row, quiz_row
from tiny.model import Model
from tiny.tasks import Quiz

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NAMES = ("Emma", "Thomas", "the baker", "London", "the river", "Captain Brown")
SEED = 1_000_000  # of the questions, whatever the model was trained with
BATCH = 8


@dataclass(frozen=True)
class Examination:
    """Held-out texts, as tokens of equal number, and questions."""

    texts: list[list[int]]
    n_bytes: int  # of the texts; models of any vocabulary compare by bits per byte
    questions: dict[str, list[Row]]

    @torch.no_grad()
    def run(self, model: Model) -> dict[str, float]:
        """Return the perplexity of the texts and the share of each kind of question that is answered exactly."""
        losses = [
            functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum").item()
            for logits, tokens in _outputs(model, self.texts)
        ]
        n_tokens = sum(len(text) - 1 for text in self.texts)
        found = {name: _share(model, rows) for name, rows in self.questions.items()}
        return {
            "perplexity": round(math.exp(sum(losses) / n_tokens), 3),
            "bits_per_byte": round(sum(losses) / math.log(2) / self.n_bytes, 4),
        } | found


def examination(corpus: Corpus, n_ctx: int, trials: int) -> Examination:
    """Draw as many texts, and as many questions at every depth."""
    tokens = corpus.tokenizer.encode(corpus.held_out)
    if trials < 1:
        raise ValueError(f"{trials} texts: an evaluation needs at least one")
    step = (len(tokens) - n_ctx) // trials
    if step < 1:
        raise ValueError(f"the held-out text has {len(tokens)} tokens, too few for {trials} pieces of {n_ctx}")
    texts = [corpus.encode("") + tokens[i * step :][: n_ctx - 1] for i in range(trials)]
    hay = [Haystack("sentences", SENTENCES, False), Haystack("text", corpus.held_out, True)]
    questions = {
        f"{h.name} at {depth:g}": [_pass_key(corpus, h, n_ctx, trial, depth) for trial in range(trials)]
        for h in hay
        for depth in DEPTHS
    }
    named = [_named(corpus, Random(f"{SEED}-{trial}"), n_ctx) for trial in range(trials * len(DEPTHS))]
    n_bytes = sum(len(corpus.tokenizer.decode(text).encode()) for text in texts)
    return Examination(texts, n_bytes, questions | {"named": named})


def _pass_key(corpus: Corpus, haystack: Haystack, n_ctx: int, trial: int, depth: float) -> Row:
    prompt = make_prompt(lambda text: corpus.encode(text.decode()), haystack, n_ctx, trial, SEED, depth=depth)
    tokens = [*prompt.tokens, *prompt.answer]
    return tokens, [1.0] * len(prompt.tokens) + [ANSWER_WEIGHT] * len(prompt.answer)


def _named(corpus: Corpus, random: Random, n_ctx: int) -> Row:
    """One of four pass keys is asked for."""
    keys = {name: random.randint(10000, 99999) for name in random.sample(NAMES, min(4, n_ctx // 100 + 1))}
    asked = random.choice([*keys])
    needles = [f"The pass key of {name} is {key}." for name, key in keys.items()]
    question = f"What is the pass key of {asked}? The pass key of {asked} is"
    return quiz_row(corpus, random, Quiz(INTRO, needles, [(question, f" {keys[asked]}")]), n_ctx, fill=1.0)


def _outputs(model: Model, rows: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and next tokens of a few rows at a time; shorter rows end in token 0."""
    device, longest = model.token_embd.weight.device, max(map(len, rows))
    for i in range(0, len(rows), BATCH):
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows[i : i + BATCH]], device=device)
        yield model(tokens[:, :-1]), tokens[:, 1:]


def _share(model: Model, rows: list[Row]) -> float:
    """Return the share of rows all of whose answer tokens are the most probable ones.

    Given the right ones before them, they are so exactly when greedy generation finds the answer.
    """
    hits = [x.argmax(-1) == y for x, y in _outputs(model, [tokens for tokens, _ in rows])]
    right = (row for batch in hits for row in batch.tolist())
    found = [
        all(hit for hit, weight in zip(row, weights[1:], strict=False) if weight == ANSWER_WEIGHT)
        for row, (_, weights) in zip(right, rows, strict=True)
    ]
    return round(sum(found) / len(found), 4)
