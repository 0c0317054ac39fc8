"""Choosing the tokens to evict when a text does not fit into its context."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pylongctx.engine.model import Model
from pylongctx.methods import Full, parse

KEPT_TOKENS = 4  # first tokens to keep, after the BOS token
MIN_EVICTED = 4  # minimum tokens that can be evicted


class Eviction(NamedTuple):
    """Tokens to evict, from ``first`` to before ``end``, and the number of whole turns among them."""

    first: int
    end: int
    n_turn: int = 0


class Evictions(Protocol):
    """Chooses the tokens to evict while an answer is generated.

    ``most`` is the maximum tokens of an answer without a given limit; None: as many as fit without eviction.
    """

    most: int | None

    def next(self, n: int) -> Eviction | None:
        """Return what to evict from a text of ``n`` tokens that fills the context; None: nothing can be evicted."""


class Halves:
    """The evictions from a text without turns: ``n_keep`` first tokens stay, the older half of the rest is evicted."""

    most = None

    def __init__(self, n_keep: int) -> None:
        self._n_keep = n_keep

    def next(self, n: int) -> Eviction | None:
        """Return the older half of the tokens after the first ones."""
        half = (n - self._n_keep) // 2
        return Eviction(self._n_keep, self._n_keep + half) if half > 0 else None


def halves(model: Model, tokens: Sequence[int], n_keep: int | None, n_ctx: int) -> Halves:
    """Return the evictions from a prompt that keeps BOS and ``n_keep`` more tokens; None: KEPT_TOKENS, negative: all.

    As in llama.cpp, at least four tokens of the context can be evicted.
    """
    n_start = int(tokens[:1] == [model.info.token_bos])
    wanted = KEPT_TOKENS if n_keep is None else n_keep
    return Halves(min(len(tokens) if wanted < 0 else wanted + n_start, len(tokens), n_ctx - MIN_EVICTED))


def most_tokens(wanted: int | None, room: int, evictions: Evictions | None) -> int:
    """Return the maximum tokens of an answer after a prompt that leaves ``room``; ``wanted`` None: no limit given."""
    if evictions is None:
        return room if wanted is None else min(wanted, room)
    return (evictions.most or room) if wanted is None else wanted


def with_spans(spec: str, argument: str) -> str:
    """Return the method for ``spec`` ("": llama.cpp's own KV cache) with spans; ValueError names the ``argument``."""
    method = parse(spec) if spec else None
    if not isinstance(method, Full) or method.spans == 1:
        own = "llama.cpp's own KV cache (method=None)"
        raise ValueError(
            f"{argument} needs full attention, not {repr(spec) if spec else own}: use method='full', or leave it out"
        )
    return str(method if method.spans else Full(spans=2))
