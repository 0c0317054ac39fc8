"""Bootstrap intervals: known distributions, pairs of samples, and what cannot be compared."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pylongctx.eval import intervals
from pylongctx.eval.intervals import kept_share, mean_interval, paired_difference, scores_of

pytestmark = pytest.mark.check


def test_an_interval_is_that_of_the_normal_distribution_for_many_values():
    values = np.random.default_rng(1).normal(3, 2, 2000)
    found, error = mean_interval(values), values.std() / math.sqrt(len(values))
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)


def test_an_interval_holds_the_mean_as_often_as_it_says():
    random = np.random.default_rng(0)
    found = [mean_interval(random.random(60) < 0.3, draws=400, level=0.8, seed=i) for i in range(300)]
    assert sum(one.low <= 0.3 <= one.high for one in found) / 300 == pytest.approx(0.8, abs=0.07)


def test_draws_are_the_same_in_pieces(monkeypatch):
    values = np.random.default_rng(0).random(50)
    whole = mean_interval(values)
    monkeypatch.setattr(intervals, "AT_ONCE", 999)
    assert mean_interval(values) == whole
    assert mean_interval(values, seed=1) != whole


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_an_interval_is_around_the_mean_and_within_the_values(values):
    found = mean_interval(values, draws=200)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found.n == len(values)


def test_pairs_are_surer_than_each_mean():
    random = np.random.default_rng(0)
    base = {str(i): float(random.random()) for i in range(80)}
    method = {name: value - 0.05 + 0.01 * float(random.random()) for name, value in reversed(base.items())}
    found = paired_difference(base, method)
    alone = mean_interval(list(base.values()))
    assert found.difference.high < 0 and found.difference.high - found.difference.low < 0.1 * (alone.high - alone.low)
    assert found.difference.mean == pytest.approx(found.method - found.base)
    assert found.ratio == pytest.approx(found.method / found.base)


def test_a_base_of_nothing_has_no_ratio():
    assert math.isnan(paired_difference({"a": 0.0}, {"a": 1.0}).ratio)


def test_a_share_counts_every_task_as_much_and_draws_within_it():
    random = np.random.default_rng(0)
    base = [random.random(400), 0.5 * random.random(50)]
    found = kept_share([(scores, 0.8 * scores) for scores in base])
    assert (found.mean, found.low, found.high) == pytest.approx((0.8, 0.8, 0.8)) and found.n == 450
    lost = [np.where(random.random(len(scores)) < 0.2, 0, scores) for scores in base]
    found = kept_share(list(zip(base, lost, strict=True)))
    assert found.mean == pytest.approx(sum(x.mean() for x in lost) / sum(x.mean() for x in base))
    assert found.low < found.mean < found.high < 1
    assert math.isnan(kept_share([([0.0], [1.0])]).mean)
    assert kept_share([([1.0, 0.0], [0.5, 1.0])]).high == math.inf


def test_records_of_two_methods_meet_by_sample():
    record = {"task": "leval", "length": 512, "seed": 0, "score": 1.0}
    records = [record | {"id": str(i), "asked": "full"} for i in range(3)]
    assert scores_of(records, "score").keys() == scores_of([r | {"asked": "window"} for r in records], "score").keys()
    with pytest.raises(ValueError, match="two records of leval 512 0 1: give those of one method"):
        scores_of([*records, records[1]], "score")
    with pytest.raises(ValueError, match="the record of leval 512 0 0 has no 'strict'"):
        scores_of(records, "strict")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_interval([]), "at least one value, and finite ones; there are 0"),
        (lambda: mean_interval([1.0, math.nan]), "finite ones; there are 2"),
        (lambda: mean_interval([1.0], draws=0), "draws must be at least 1"),
        (lambda: mean_interval([1.0], level=1.0), "level between 0 and 1"),
        (lambda: kept_share([]), "needs tasks"),
        (lambda: kept_share([([1.0], [1.0, 0.0])]), "as many scores of the method as of the base"),
        (lambda: paired_difference({"a": 1, "b": 1}, {"a": 1, "c": 1}), "2 samples .* of one method only, such as 'b'"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
