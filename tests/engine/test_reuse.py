"""The plan of what a prompt reuses (pylongctx/engine/reuse.py), of sources that only say what they have."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import few

from pylongctx.engine.documents import Placed
from pylongctx.engine.reuse import Piece, Reading, plan

N_BLOCK = 8


@dataclass(eq=False)
class Rows:
    """A sequence that can be cut back to some lengths: to all of them, or where it has checkpoints.

    Attributes
    ----------
    ends : set of int
        The lengths.
    known : int
        The length after which the logits are known.
    exact : bool
        Whether its rows are what reading the prompt gives.
    """

    ends: set[int]
    known: int = -1
    exact: bool = True
    slow: bool = False
    whole: bool = False
    name: str = "rows"

    def covers(self, tokens, held):
        n = max((end for end in self.ends if end <= len(tokens)), default=0)
        return Piece(self, 0, n, logits=n == self.known, exact=self.exact) if n > held else None


@dataclass(eq=False)
class Blocks:
    """Stored blocks that follow each other, and then a tail of some tokens; see ``Rows``."""

    n: int
    tail: int = 0
    whole: bool = False
    exact: bool = True
    slow: bool = True
    name: str = "blocks"
    ends: set[int] = field(init=False)

    def __post_init__(self):
        self.known = self.n * N_BLOCK + self.tail if self.tail else -1
        self.ends = {*range(0, self.n * N_BLOCK + 1, N_BLOCK), self.known} - {-1}

    def covers(self, tokens, held):
        n = max(end for end in self.ends if end <= len(tokens))
        first = 0 if self.whole else held // N_BLOCK * N_BLOCK
        return Piece(self, first, n, logits=n == self.known) if n > held else None


def tokens_of(n):
    return np.arange(n, dtype=np.int32)


def free(n, **more):
    """Return a sequence that can be cut back anywhere."""
    return Rows(set(range(n + 1)), **more)


def planned(n, sources, placed=()):
    """Return the plan of a prompt of ``n`` tokens as tuples; documents have no number."""
    pieces = plan(tokens_of(n), sources, placed)
    return [(sources.index(p.source) if p.source in sources else None, p.first, p.end) for p in pieces]


def test_nothing_is_reused_where_no_sequence_has_anything():
    assert planned(50, []) == planned(50, [Rows({0}), Blocks(0)]) == []


def test_what_leads_farthest_is_taken():
    assert planned(50, [free(10), Rows({0, 30}), free(20)]) == [(1, 0, 30)]


def test_the_earlier_of_two_that_lead_as_far_is_taken():
    assert planned(50, [free(24), Blocks(3)]) == [(0, 0, 24)]
    assert planned(50, [free(5), Blocks(3), free(24)])[-1] == (1, 0, 24)


def test_blocks_follow_what_is_held():
    assert planned(50, [free(20), Blocks(5)]) == [(0, 0, 16), (1, 16, 40)]
    assert planned(50, [free(16), Blocks(5, 3)]) == [(0, 0, 16), (1, 16, 43)]


def test_blocks_begin_at_0_where_nothing_can_be_cut_to_where_they_would():
    assert planned(50, [Rows({0, 20}), Blocks(5)]) == [(1, 0, 40)]
    assert planned(50, [Rows({0, 15, 20}), Blocks(5)]) == [(1, 0, 40)]
    assert planned(50, [free(20), Blocks(5, whole=True)]) == [(1, 0, 40)]


def test_blocks_follow_the_earliest_that_can_be_cut_to_where_they_begin():
    """A sequence that holds the rows loads nothing, also where a state leads a little farther."""
    assert planned(50, [free(18), Rows({0, 16, 20}), Blocks(5)]) == [(0, 0, 16), (2, 16, 40)]
    assert planned(50, [Rows({0, 18}), Rows({0, 16, 20}), Blocks(5)]) == [(1, 0, 16), (2, 16, 40)]
    assert planned(50, [Rows({0, 18}), Rows({0, 16}, exact=False), Blocks(5)]) == [(2, 0, 40)]


def test_the_last_token_is_evaluated_unless_its_logits_are_known():
    assert planned(20, [free(30)]) == [(0, 0, 19)]
    assert planned(20, [free(20, known=20)]) == [(0, 0, 20)]
    assert planned(20, [Rows({0, 12, 20})]) == [(0, 0, 12)]
    assert planned(20, [Rows({0, 12, 20}), Blocks(2, 4)]) == [(1, 0, 20)]
    assert planned(16, [Blocks(2)]) == [(0, 0, 8)]


def test_nothing_continues_rows_that_have_read_something_else():
    lossy = free(20, exact=False)
    assert planned(50, [lossy, Blocks(5)]) == [(0, 0, 20)]
    assert planned(50, [Blocks(5), lossy]) == [(0, 0, 40)]
    assert planned(50, [Rows({0}, exact=False), Blocks(5)]) == [(1, 0, 40)]


def test_documents_follow_the_beginning():
    one, two = Placed(20, 30), Placed(35, 45)
    assert planned(50, [], [one, two]) == [(None, 20, 30), (None, 35, 45)]
    assert planned(50, [Rows({0}), free(40)], [one, two]) == [(1, 0, 20), (None, 20, 30), (None, 35, 45)]
    assert planned(50, [Rows({0}), Blocks(5)], [one, two]) == [(1, 0, 16), (None, 20, 30), (None, 35, 45)]


def test_a_sequence_may_hold_documents():
    one, two = Placed(20, 30), Placed(35, 45)
    assert planned(50, [free(33), Blocks(6)], [one, two]) == [(0, 0, 33), (None, 35, 45)]
    assert planned(50, [free(49), Blocks(6)], [one, two]) == [(0, 0, 49)]
    assert planned(50, [free(25)], [one, two]) == [(0, 0, 25), (None, 35, 45)]  # the rest of it is evaluated


def test_a_document_is_fetched_from_its_own_rows():
    place = Placed(20, 30)
    (piece,) = plan(tokens_of(50), [], [place])
    (load,) = piece.source.fetch(piece)
    assert (load.placed, load.tokens.tolist()) == (place, list(range(20, 30)))
    assert isinstance(piece.source, Reading) and not piece.source.fail(piece, ValueError())


# ---- any sources ----

lengths = st.integers(0, 40)
rows = st.builds(Rows, st.sets(lengths).map(lambda ends: {0, *ends}), lengths, st.booleans())
freely = st.builds(free, lengths, known=lengths, exact=st.booleans())
blocks = st.builds(Blocks, st.integers(0, 5), st.integers(0, 6), st.booleans())


@st.composite
def documents(draw, n):
    """Return documents in a prompt of ``n`` tokens, the last of which is in none."""
    edges = sorted(draw(st.sets(st.integers(0, n - 1), max_size=6)))
    return [Placed(first, end) for first, end in zip(edges[::2], edges[1::2], strict=False)]


@st.composite
def prompts(draw):
    n = draw(st.integers(1, 45))
    return n, draw(st.lists(rows | freely | blocks, max_size=4)), draw(documents(n))


def farthest(n, sources, placed):
    """Return how far any source leads, and the first one that does: what a plan must reach."""
    best, winner = 0, None
    for source in sources:
        most = placed[0].first if placed and source is not sources[0] else n
        ends = [end for end in source.ends if end <= most and (end < n or end == source.known)]
        if max(ends) > best:
            best, winner = max(ends), source
            if not source.exact:
                break
    return best, winner


def is_whole(source, n):
    """Return whether a source has the first ``n`` tokens as one piece, which ends there."""
    piece = source.covers(tokens_of(n), n - 1)
    return piece is not None and piece.first == 0


@settings(max_examples=few(1200), deadline=None)
@given(prompts())
def test_every_plan_keeps_the_rules(prompt):
    n, sources, placed = prompt
    pieces = plan(tokens_of(n), sources, placed)
    beginning = [piece for piece in pieces if piece.source in sources]
    rest = pieces[len(beginning) :]
    ends = [0, *(piece.end for piece in pieces)]
    assert all(end <= piece.first < piece.end for end, piece in zip(ends, pieces, strict=False))
    assert ends[-1] < n or pieces[-1].logits
    best, winner = farthest(n, sources, placed)
    assert best == ends[len(beginning)]
    assert winner is (beginning[-1].source if beginning else None)
    assert [(p.first, p.end) for p in rest] == [(p.first, p.end) for p in placed if p.first >= best]
    assert len(beginning) <= 2
    for piece in beginning:
        assert piece.end in piece.source.ends
    if len(beginning) == 2:
        before, last = beginning
        assert before.end == last.first and not last.source.whole
        earlier = sources[: sources.index(last.source)]
        assert before.source is next(source for source in earlier if source.exact and is_whole(source, before.end))


@pytest.mark.parametrize("whole", [False, True])
def test_a_plan_asks_for_no_more_than_the_prompt(whole):
    asked = []
    source = Blocks(9, 5, whole)
    source.covers = lambda tokens, held: asked.append((len(tokens), held))
    plan(tokens_of(30), [free(10), source], [Placed(20, 25)])
    assert asked == [(20, 10)]
