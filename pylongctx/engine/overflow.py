"""What leaves a text that does not fit into its context."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pylongctx.engine.model import Model
from pylongctx.methods import Full, parse

KEEP = 4  # tokens of the beginning that stay, behind the BOS token
LEAST = 4  # tokens of the context that can leave


class Cut(NamedTuple):
    """Tokens that leave, from ``first`` to before ``end``, and how many whole turns of a conversation they are."""

    first: int
    end: int
    n_turn: int = 0


class Cuts(Protocol):
    """Says what leaves a text while its answer is written.

    Attributes
    ----------
    most : int or None
        Most tokens of an answer for which nobody gives a number; None: as many as fit without a cut.
    """

    most: int | None

    def next(self, n: int) -> Cut | None:
        """Return what leaves a text of ``n`` tokens that is full; None: nothing can."""


class Halves:
    """Cuts of a text without turns: its beginning stays, and the older half of the rest leaves.

    Parameters
    ----------
    n_keep : int
        Tokens of the beginning.
    """

    most = None

    def __init__(self, n_keep: int) -> None:
        self._n_keep = n_keep

    def next(self, n: int) -> Cut | None:
        """Return the older half of what follows the beginning."""
        half = (n - self._n_keep) // 2
        return Cut(self._n_keep, self._n_keep + half) if half > 0 else None


def halves(model: Model, tokens: Sequence[int], n_keep: int | None, n_ctx: int) -> Halves:
    """Return the cuts of a prompt of which the BOS token and ``n_keep`` more stay; None: KEEP, negative: all.

    As in llama.cpp, at least four tokens of the context can leave.
    """
    n_start = int(tokens[:1] == [model.info.token_bos])
    wanted = KEEP if n_keep is None else n_keep
    return Halves(min(len(tokens) if wanted < 0 else wanted + n_start, len(tokens), n_ctx - LEAST))


def most_tokens(wanted: int | None, room: int, cuts: Cuts | None) -> int:
    """Return the most tokens of an answer behind a prompt that leaves ``room``; ``wanted`` None: nobody says."""
    if cuts is None:
        return room if wanted is None else min(wanted, room)
    return (cuts.most or room) if wanted is None else wanted


def evicting(spec: str) -> str:
    """Return the method that drops rows where ``spec`` is asked for, empty standing for llama.cpp's own KV cache.

    Raises
    ------
    ValueError
        When that method drops none.
    """
    method = parse(spec) if spec else None
    if not isinstance(method, Full) or method.spans == 1:
        own = "llama.cpp's own KV cache (method=None)"
        raise ValueError(
            f"overflow='evict_middle' drops rows of full attention, not of {repr(spec) if spec else own}: "
            "use method='full', or overflow='error'"
        )
    return str(method if method.spans else Full(spans=2))
