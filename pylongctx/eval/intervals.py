"""Bootstrap intervals of a mean score, and of the difference of two methods on the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pylongctx.eval.task import Record

DRAWS = 10_000
LEVEL = 0.95
AT_ONCE = 1 << 22  # drawn values that are held together


@dataclass(frozen=True)
class Interval:
    """A mean and the range that holds it with the given confidence.

    Attributes
    ----------
    mean : float
        Of the values.
    low, high : float
        Percentiles of the means of resampled values.
    n : int
        Number of values.

    Examples
    --------
    >>> str(Interval(0.5, 0.25, 0.75, 8))
    '0.500 [0.250, 0.750], n = 8'
    """

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}], n = {self.n}"


@dataclass(frozen=True)
class Difference:
    """A method compared with a base, on the same samples.

    Attributes
    ----------
    base, method : float
        Mean scores.
    difference : Interval
        Of the paired differences, method minus base.
    ratio : float
        Mean of the method divided by that of the base; NaN for a base of 0.
    """

    base: float
    method: float
    difference: Interval
    ratio: float


def mean_interval(values: Sequence[float], draws: int = DRAWS, level: float = LEVEL, seed: int = 0) -> Interval:
    """Return the mean of values with its percentile bootstrap interval.

    Parameters
    ----------
    values : sequence of float
        One score per sample, at least one.
    draws : int
        How many times as many values are drawn, with replacement.
    level : float
        Share of the means inside the interval, between 0 and 1.
    seed : int
        Of the draws.

    Raises
    ------
    ValueError
        When there are no values, one is not finite, or ``draws`` or ``level`` is out of range.

    Examples
    --------
    >>> found = mean_interval([0.0, 1.0] * 50)
    >>> found.mean, 0.38 < found.low < 0.42, 0.58 < found.high < 0.62
    (0.5, True, True)
    """
    data = np.asarray(values, float)
    if not data.size or not np.isfinite(data).all():
        raise ValueError(f"an interval needs at least one value, and finite ones; there are {data.size}")
    if draws < 1 or not 0 < level < 1:
        raise ValueError(f"draws must be at least 1 and level between 0 and 1, not {draws} and {level}")
    means = np.concatenate(list(_means(data, draws, np.random.default_rng(seed))))
    low, high = np.percentile(means, [50 * (1 - level), 50 * (1 + level)])
    return Interval(float(data.mean()), float(low), float(high), data.size)


def _means(data: NDArray[np.float64], draws: int, random: np.random.Generator) -> Iterator[NDArray[np.float64]]:
    rows = max(1, AT_ONCE // data.size)
    for start in range(0, draws, rows):
        drawn = random.integers(0, len(data), (min(rows, draws - start), len(data)))
        yield data[drawn].mean(1)


def paired_difference(
    base: Mapping[str, float],
    method: Mapping[str, float],
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: int = 0,
) -> Difference:
    """Return how much higher the scores of a method are than those of a base, on the same samples.

    Parameters
    ----------
    base, method : mapping of str to float
        Scores by sample, see ``scores_of``.

    Raises
    ------
    ValueError
        When the samples are not the same, or there are none.

    Examples
    --------
    >>> found = paired_difference({"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.25})
    >>> found.difference.mean, round(found.ratio, 3)
    (-0.125, 0.833)
    """
    if other := base.keys() ^ method.keys():
        raise ValueError(f"{len(other)} samples have a score of one method only, such as {min(other)!r}: run the rest")
    names = sorted(base)
    interval = mean_interval([method[name] - base[name] for name in names], draws, level, seed)
    mean_base, mean_method = (float(np.mean([scores[name] for name in names])) for scores in (base, method))
    return Difference(mean_base, mean_method, interval, mean_method / mean_base if mean_base else float("nan"))


def kept_share(tasks: Sequence[tuple[Sequence[float], Sequence[float]]], draws: int = DRAWS, seed: int = 0) -> Interval:
    """Return how much of a base's mean score over several tasks a method keeps, 1 for all of it.

    Parameters
    ----------
    tasks : sequence of pairs
        Scores of the base and of the method on the same samples, in the same order, for each task. Every task counts
        as much, and samples are drawn in pairs within each task.

    Returns
    -------
    Interval
        ``n`` is the number of samples. NaN where the base has no score at all.

    Raises
    ------
    ValueError
        When there are no tasks, or a task's scores are not as many for the method as for the base.

    Examples
    --------
    >>> found = kept_share([([1.0] * 8, [1.0] * 8), ([1.0] * 8, [0.5] * 8)])
    >>> str(found)
    '0.750 [0.750, 0.750], n = 16'
    """
    if not tasks or any(len(base) != len(method) or not len(base) for base, method in tasks):
        raise ValueError("a share needs tasks with as many scores of the method as of the base, at least one each")
    pairs = [np.stack([np.asarray(base, float), np.asarray(method, float)], axis=1) for base, method in tasks]
    base, method = np.sum([pair.mean(0) for pair in pairs], axis=0)
    n = sum(map(len, pairs))
    if not base:
        return Interval(np.nan, np.nan, np.nan, n)
    random = np.random.default_rng(seed)
    drawn = np.sum([np.concatenate(list(_means(pair, draws, random))) for pair in pairs], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):  # few samples may draw a base of 0, without a bound
        shares, levels = drawn[:, 1] / drawn[:, 0], [50 * (1 - LEVEL), 50 * (1 + LEVEL)]
    low, high = np.nanpercentile(shares, levels, method="nearest")
    return Interval(float(method / base), float(low), float(high), n)


def scores_of(records: Sequence[Record], score: str) -> dict[str, float]:
    """Return a score of records by what is the same for all methods: task, length, seed and sample.

    Raises
    ------
    ValueError
        When a record has no such score, or two are of one sample, as those of two methods are.

    Examples
    --------
    >>> record = {"task": "babilong-qa1", "length": 4096, "seed": 0, "id": "4096-0-0", "score": 1.0}
    >>> scores_of([record], "score")
    {'babilong-qa1 4096 0 4096-0-0': 1.0}
    """
    found: dict[str, float] = {}
    for record in records:
        name = " ".join(str(record[key]) for key in ("task", "length", "seed", "id"))
        if score not in record:
            raise ValueError(f"the record of {name} has no {score!r}")
        if name in found:
            raise ValueError(f"there are two records of {name}: give those of one method")
        found[name] = float(record[score])
    return found
