"""The length of drafts follows acceptance and step times; drafts that do not pay are turned off, and tried again."""

import numpy as np
import pytest

from pylongctx import LlamaDraftModel
from pylongctx.engine import drafting as module
from pylongctx.engine.drafting import (
    FIRST_PAUSE,
    LENGTH_TOKENS,
    LENGTHS,
    MAX_PAUSE,
    REFRESH,
    TRIAL_TOKENS,
    DraftLength,
    Rate,
    StepTimes,
)


def measured(seconds):
    times = StepTimes()
    for n, value in seconds.items():
        times.add(n, value)
    return times


@pytest.mark.parametrize(
    ("known", "n", "expected"),
    [
        ({}, 1, 1.0),
        ({}, 11, 2.0),
        ({1: 0.5}, 1, 0.5),
        ({1: 0.5}, 11, 1.0),
        ({2: 1.1}, 1, 1.0),
        ({1: 1.0, 5: 2.0}, 3, 1.5),
        ({1: 1.0, 5: 2.0}, 9, 3.0),
        ({1: 1.0, 5: 2.0, 9: 2.0}, 7, 2.0),
        ({1: 1.0, 5: 0.5}, 9, 1.0),  # more tokens are never expected to take less time
    ],
)
def test_times_between_and_beyond_the_measured_ones(known, n, expected):
    assert measured(known).seconds(n) == pytest.approx(expected)


def test_times_follow_the_latest_steps():
    times = measured({1: 1.0})
    for _ in range(50):
        times.add(1, 3.0)
    assert times.seconds(1) == pytest.approx(3.0, rel=1e-3)


def test_a_rate_forgets():
    rate = Rate(8.0, 0.0, 0.0)
    for _ in range(100):
        rate.add(1, 1)
    assert rate.value > 0.98 and rate.tried <= 9
    for _ in range(20):
        rate.add(0, 1)
    assert rate.value < 0.12


def drafting(length, times, accepted_of, steps=400, n_others=0, most=48):
    """Return tokens and seconds of an answer, by true times and acceptance."""
    tokens, seconds, drafts = 0, 0.0, []
    for _ in range(steps):
        n = length.choose(times, n_others, most)
        took = accepted_of.step(1 + n_others + n)
        times.add(1 + n_others + n, took)
        accepted = min(n, accepted_of.right())
        if n:
            length.add(n, accepted)
        drafts.append(n)
        tokens, seconds = tokens + 1 + accepted, seconds + took
    return tokens, seconds, drafts


class World:
    """A machine where each token of a step costs ``slope``, and drafts are right for ``right`` tokens."""

    def __init__(self, slope, right):
        self.slope, self._right = slope, right

    def step(self, n):
        return 1 + self.slope * (n - 1)

    def right(self):
        return self._right


@pytest.mark.parametrize(("slope", "right"), [(0.0, 48), (0.1, 48), (0.3, 48), (0.1, 3)])
def test_drafts_that_pay_are_used(slope, right):
    world = World(slope, right)
    tokens, seconds, drafts = drafting(DraftLength(), StepTimes(), world)
    best = max((1 + min(n, right)) / world.step(1 + n) for n in (0, *LENGTHS[:-1]))
    assert tokens / seconds > 0.85 * best
    assert drafts.count(0) <= 2 + len(drafts) // REFRESH


@pytest.mark.parametrize(("slope", "right"), [(1.0, 48), (0.5, 0), (0.02, 0), (2.0, 2)])
def test_drafts_that_do_not_pay_cost_little(slope, right):
    tokens, seconds, drafts = drafting(DraftLength(), StepTimes(), World(slope, right), steps=500)
    assert tokens / seconds > 0.97
    assert max(drafts[-MAX_PAUSE:]) <= TRIAL_TOKENS


def test_an_expensive_draft_model_is_turned_off():
    length, times = DraftLength(), measured({1: 0.1, 5: 0.1})
    assert length.choose(times, 0, 4) > 0
    length.took(4, 1.0)
    assert [length.choose(times, 0, 4) for _ in range(FIRST_PAUSE)] == [0] * FIRST_PAUSE
    assert length.choose(times, 0, 4) > 0  # tried again


@pytest.mark.parametrize(
    ("right", "copy", "pays"),
    [(8, 0.0, True), (8, 9.0, False), (0, 0.0, False), (2, 0.1, True)],
)
def test_a_copied_state_and_tokens_that_are_evaluated_again(right, copy, pays):
    """A wrong draft of a model with recurrent layers costs two copies, and its right tokens a second time."""
    world, length, times = World(0.2, right), DraftLength(), StepTimes()
    tokens = seconds = again = 0
    drafts = []
    for _ in range(300):
        n = 0 if again else length.choose(times, 0, 8)
        took = world.step(1 + again + n)
        times.add(1 + again + n, took)
        accepted = min(n, right)
        if n:
            length.add(n, accepted)
            length.copied(copy)
            took += copy * (1 + (accepted < n))
            drafts.append(n)
        again = 1 + accepted if accepted < n else 0
        tokens, seconds = tokens + 1 + accepted, seconds + took
    assert tokens / seconds > (1.1 if pays else 0.9)
    assert (len(drafts) > 60) == pays


def test_drafts_that_pay_only_without_a_state():
    costs = measured({n: 1 + 0.45 * (n - 1) for n in range(1, 10)})
    lengths = DraftLength(), DraftLength()
    for length in lengths:
        for _ in range(30):
            length.add(4, 0)
            length.add(4, 2)
    lengths[1].copied(0.0)
    assert lengths[0].choose(costs, 0, 8) > 0
    assert lengths[1].choose(costs, 0, 8) == 0


def test_other_answers_share_a_step():
    """A draft that delays three other answers must be worth it for all of them."""
    times = measured({1: 1.0, 4: 1.0, 8: 2.5})
    alone, among = DraftLength(), DraftLength()
    for length in (alone, among):
        for _ in range(20):
            length.add(4, 1)
    assert alone.choose(times, 0, 8) > 0
    assert among.choose(times, 3, 8) == 0


def test_drafts_of_a_batch_share_its_time(monkeypatch):
    """In proportion to their tokens; a text without a draft has no part."""

    class Together(LlamaDraftModel):
        adaptive = True

        def __call__(self, input_ids, /, n_max=0, **kwargs):
            return input_ids[:n_max]

        def draft_all(self, requests):
            return [request.tokens[: request.n_max] for request in requests]

    clock = iter((10.0, 16.0))
    monkeypatch.setattr(module, "perf_counter", lambda: next(clock))
    model, took = Together(), []
    monkeypatch.setattr(DraftLength, "took", lambda self, drafted, seconds: took.append((drafted, seconds)))
    wanted = [(module.Drafting(model), module.DraftRequest(np.arange(9, dtype=np.int32), n)) for n in (4, 0, 2)]
    assert [draft.tolist() for draft in module.guess(wanted)] == [[0, 1, 2, 3], [], [0, 1]]
    assert took == [(4, 4.0), (0, 0.0), (2, 2.0)]


def test_a_length_is_kept_while_no_draft_is_verified(monkeypatch):
    """Without drafts, in a pause or since none is found, a step costs no comparison of lengths."""
    chosen, choose = [], DraftLength._choose
    monkeypatch.setattr(DraftLength, "_choose", lambda self, *args: chosen.append(args) or choose(self, *args))
    length, times = DraftLength(), measured({1: 0.1, 5: 0.1})
    found = [length.choose(times, 0, 8) for _ in range(LENGTH_TOKENS + 1)]
    assert len(chosen) == 2 and found == [8] * (LENGTH_TOKENS + 1)
    assert length.choose(times, 0, 5) == 5
    length.took(4, 1.0)  # they do not pay: off
    assert [length.choose(times, 0, 8) for _ in range(FIRST_PAUSE)] == [0] * FIRST_PAUSE
    assert len(chosen) == 3
    length.choose(times, 1, 8)  # a step of two answers was not measured
    assert len(chosen) == 3
    times.add(2, 0.1)
    length.choose(times, 1, 8)
    assert len(chosen) == 4


def test_no_room_is_not_a_draft():
    assert DraftLength().choose(measured({1: 1.0}), 0, 0) == 0


def test_a_step_without_a_draft_comes_first():
    assert DraftLength().choose(StepTimes(), 0, 8) == 0
    assert DraftLength().choose(measured({1: 1.0}), 0, 8) > 0
