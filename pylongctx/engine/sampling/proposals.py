"""Rejection sampling: which tokens of a draft an answer keeps, so that its distribution stays that of the model."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.sampler import Sampler

Row = NDArray[np.float32]
NO_REPETITIONS: dict[str, Any] = {
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "dry_multiplier": 0.0,
}


class Proposals:
    """The tokens of one draft, drawn from the probabilities of a draft model.

    A token that was drawn with probability q, and that the answer would have with probability p, is kept with
    probability min(1, p / q); otherwise the answer's token is drawn from max(0, p - q). Its distribution is p for every
    q. Leviathan et al., arXiv 2211.17192, algorithm 1. Drafts are drawn by the samplers of the answer, without the
    penalties of repetitions.

    Parameters
    ----------
    sampler : Sampler
        That of the answer, which ``takes_proposals``.

    Examples
    --------
    >>> from pylongctx.engine.sampling.params import SamplingParams
    >>> params = SamplingParams(seed=1, temp=1.0, repeatable=False)
    >>> proposals = Proposals(Sampler(llm.session.model, params))
    >>> logits = np.full(llm.n_vocab(), -9, np.float32)
    >>> logits[7] = 9
    >>> proposals.draw(logits), len(proposals)
    (7, 1)
    """

    def __init__(self, sampler: Sampler) -> None:
        self._n_vocab = int(sampler.model.info.n_vocab)
        self._random = np.random.default_rng(sampler.params.seed)
        self._sampler = Sampler(sampler.model, self._drawing(sampler.params))
        self.tokens: list[int] = []
        self._probs: list[Row] = []

    def _drawing(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of drafts: draws that do not depend on those of the answer."""
        return replace(params, seed=int(self._random.integers(2**32)), **NO_REPETITIONS)

    def __len__(self) -> int:
        return len(self.tokens)

    def begin(self) -> None:
        """Begin a draft."""
        self.tokens, self._probs = [], []

    def draw(self, row: Row) -> int:
        """Draw the next token of the draft from the logits of a draft model, float32 [n]."""
        probs = np.zeros(self._n_vocab, np.float32)
        known = np.ascontiguousarray(row[: self._n_vocab])  # vocabularies may differ by a few tokens at the end
        self.tokens.append(self._sampler.choose(known))
        probs[: len(known)] = self._sampler.probs(len(known))
        self._probs.append(probs)
        return self.tokens[-1]

    def decide(self, i: int, target: Row) -> int:
        """Return token ``i`` of the draft or another one, by the probabilities of the answer, float32 [n_vocab]."""
        token, probs = self.tokens[i], self._probs[i]
        if self._random.random() * probs[token] < target[token]:
            return token
        rest = np.maximum(target.astype(np.float64) - probs, 0).cumsum()
        if not rest[-1]:  # both are the same, and were rounded
            rest = target.cumsum(dtype=np.float64)
        return int(rest.searchsorted(self._random.random() * rest[-1], side="right"))
