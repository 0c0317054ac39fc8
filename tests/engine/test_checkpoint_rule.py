"""Where checkpoints of a prompt and of an answer are made, without a model that needs them."""

from types import SimpleNamespace

import pytest
from llamas import new

from pylongctx._lib import lib
from pylongctx.engine.session import SPACING, TAIL, Checkpoints

pytestmark = pytest.mark.check


def walk(
    pos: int, n: int, step: int = 512, wishes=(), needed: bool = True, chunk: int = 1
) -> tuple[list[int], list[int]]:
    """Return the places of checkpoints and the lengths of the steps of a text of ``n`` tokens after ``pos``."""
    made, steps, here = [], [], [pos]
    context = SimpleNamespace(
        keeps_checkpoints=needed,
        checkpoint=lambda seq: made.append(here[0]) or "",
        cut_before=lambda pos: pos - pos % chunk,
    )
    rule = Checkpoints(context, 0)
    for wish in wishes:
        rule.request(wish)
    rule.begin(pos, n)
    while here[0] < pos + n:
        steps.append(rule.limit_step(here[0], min(step, pos + n - here[0])))
        here[0] += steps[-1]
        rule.reach(0, here[0])
    return made, steps


def test_a_prompt_has_one_before_its_end():
    assert walk(0, 700) == ([700 - TAIL], [512, 188 - TAIL, TAIL])


def test_a_prompt_that_continues_has_one_at_its_beginning():
    assert walk(700, 100) == ([700, 800 - TAIL], [100 - TAIL, TAIL])


def test_a_long_prompt_has_more():
    made, _ = walk(100, 3 * SPACING)
    assert made == [
        100,
        SPACING,
        2 * SPACING,
        3 * SPACING,
        100 + 3 * SPACING - TAIL,
    ]


def test_a_short_text_has_none():
    assert walk(700, TAIL) == ([], [TAIL])
    assert walk(700, 1) == ([], [1])


def test_an_answer_has_one_now_and_then():
    made, steps = walk(SPACING - 3, 5, step=1)
    assert made == [SPACING]
    assert steps == [1] * 5


def test_requests_hold_for_the_text_that_follows():
    made, steps = walk(50, 200, wishes=(50, 20, 120, 249, 300))
    assert made == [50, 120, 250 - TAIL]
    assert sum(steps) == 200


def test_places_are_where_chunks_begin_when_only_these_can_be_cut():
    made, _ = walk(0, 2 * SPACING + 300, wishes=(100,), chunk=48)
    assert made == [
        96,
        SPACING - SPACING % 48,
        2 * SPACING - 2 * SPACING % 48,
        (2 * SPACING + 300 - TAIL) // 48 * 48,
    ]
    made, _ = walk(50, 100, chunk=48)
    assert made == [96]


def test_nothing_happens_where_the_cache_can_go_back():
    assert walk(700, 1300, wishes=(900,), needed=False) == ([], [512, 512, 276])


@pytest.mark.parametrize("method", [None, "full"])
def test_a_plain_model_takes_no_more_steps(embedded_model, monkeypatch, method):
    with new(embedded_model, method=method, n_ubatch=64) as llm:
        steps, session = [], llm.session
        decode = session.context.decode
        counted = lambda part, *args: steps.append(len(part)) or decode(part, *args)  # noqa: E731
        monkeypatch.setattr(session.context, "decode", counted)
        monkeypatch.setattr(session.context, "checkpoint", None)
        assert session.context.rollback == lib.LCTX_ROLLBACK_FREE
        llm.eval([7] * 200)
        llm(llm.detokenize([9] * 150).decode(), max_tokens=1)
    assert steps[:4] == [64, 64, 64, 8]
