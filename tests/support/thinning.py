"""Which cases the default suite runs: few that have every value of every axis; ``pytest --all`` runs them all.

A test with ``@thin`` stands for a product or a table of cases. The default suite takes as few of them as have every
value of every axis once, or with ``@thin(strength=2)`` every pair of values that any case has. Axes are the parameters
of the test; a parameter that is a case of a table, or names one (``@thin(table=BY_NAME)``), has an axis per field.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any

import pytest
from needs import required

Axes = Mapping[str, Hashable]
NOT_AXES = ("name", "seed")  # of a case
run_all = False  # set by --all before the tests are imported


def thin(test=None, *, table: Mapping[str, Any] | None = None, strength: int = 1):
    """Mark a test whose cases the default suite thins out."""
    mark = pytest.mark.thin(table=table or {}, strength=strength)
    return mark(test) if test else mark


def few(n: int) -> int:
    """Return how many random examples to draw: ``n`` in the full suite, a quarter in the default one."""
    return n if run_all else max(1, n // 4)


def cover(rows: Sequence[Axes], strength: int = 1) -> list[int]:
    """Return the indices of few rows that have every combination of ``strength`` values that any row has.

    Greedy: next comes the row with the most combinations that are missing, of equal ones the one whose values were
    taken least often, and of equal ones the first.
    """
    numbers: dict[Hashable, int] = {}
    has = [
        {numbers.setdefault(some, len(numbers)) for some in combinations(sorted(row.items()), min(strength, len(row)))}
        for row in rows
    ]
    missing, taken, chosen = set(range(len(numbers))), Counter(), []
    while missing:
        best = max(range(len(rows)), key=lambda i: (len(has[i] & missing), -sum(taken[x] for x in rows[i].items())))
        chosen.append(best)
        missing -= has[best]
        taken.update(rows[best].items())
    return sorted(chosen)


def axes_of(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the axes of a case and its value on each of them."""
    if is_dataclass(value):
        yield name, type(value).__name__
        for field in fields(value):
            if field.name not in NOT_AXES:
                yield from axes_of(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from axes_of(f"{name}.{key}", part)
    else:
        yield name, repr(value)


def axes(item: pytest.Item, table: Mapping[str, Any]) -> Axes:
    """Return the axes of one case of a test."""
    found: dict[str, str] = {}
    for name, value in item.callspec.params.items():
        found |= axes_of(name, table.get(value, value) if isinstance(value, str) else value)
    return found


def thinned(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that the default suite runs, in their order."""
    by_test = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("thin")
        by_test[item.nodeid.partition("[")[0] if mark else item.nodeid].append(item)
    kept = set()
    for cases in by_test.values():
        mark = cases[0].get_closest_marker("thin")
        if mark and len(cases) > 1:
            rows = [axes(item, mark.kwargs["table"]) for item in cases]
            cases = [cases[i] for i in cover(rows, mark.kwargs["strength"])]
        kept.update(cases)
    return [item for item in items if item in kept]


# ---- hooks ----


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every case of every test (make test-all)")


def pytest_configure(config):
    global run_all
    run_all = config.getoption("--all")
    required()  # or nothing would notice a group that is misspelt
    config.addinivalue_line(
        "markers", "thin(table, strength): the default suite takes few of the cases; see thinning.py"
    )


def pytest_collection_modifyitems(config, items):
    if not run_all:
        kept = thinned(items)
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept
