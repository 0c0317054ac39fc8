"""Items that a thread reads ahead (pylongctx/engine/reuse.py)."""

import threading
import time

import pytest

from pylongctx.engine.reuse import Fetch, Now

PATIENCE = 10.0


class Items:
    """An iterator of numbers; ``read`` says how many were asked for."""

    def __init__(self, n=9, failure=None):
        self.n, self.failure, self.read = n, failure, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.read == self.n:
            raise self.failure or StopIteration
        self.read += 1
        return self.read


def taken(fetch):
    """Return all items, each of which is used before the next one is offered."""
    found = []
    while (item := fetch.take()) is not None:
        found.append(item)
        fetch.go_on()
    return found


def waited_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("kind", [Now, lambda items: Fetch(items, lambda: None)])
def test_items_come_in_order(kind):
    assert taken(kind(Items())) == list(range(1, 10))
    assert taken(kind(Items(0))) == []


def test_what_fails_is_raised_where_it_is_taken():
    fetch = Fetch(Items(2, OSError("gone")), lambda: None)
    assert fetch.take() == 1
    fetch.go_on()
    assert fetch.take() == 2
    with pytest.raises(OSError, match="gone"):
        fetch.take()


def test_who_waits_is_woken_for_each_item_and_for_the_end():
    woken = threading.Semaphore(0)
    fetch = Fetch(Items(3), woken.release)
    for item in (1, 2, 3, None):
        assert woken.acquire(timeout=PATIENCE)
        assert fetch.ready and fetch.take() == item
        assert item is None or not fetch.ready or item == 3  # the end needs no room
        fetch.go_on()


def test_one_item_is_offered_while_the_next_is_read():
    items = Items()
    fetch = Fetch(items, lambda: None)
    assert waited_for(lambda: items.read == 2)
    assert fetch.take() == 1
    time.sleep(0.02)
    assert (items.read, fetch.ready) == (2, False)
    fetch.go_on()
    assert waited_for(lambda: fetch.ready and items.read == 3)


def test_the_next_item_is_read_after_a_pause():
    fetch = Fetch(Items(), lambda: None)
    fetch.take()
    started = time.monotonic()
    fetch.go_on(0.05)
    assert fetch.take() == 2
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize("rest", [0.0, 1000.0])
def test_nothing_is_read_after_a_cancellation(rest):
    items, before = Items(), threading.active_count()
    fetch = Fetch(items, lambda: None)
    fetch.take()
    if rest:
        fetch.go_on(rest)
    fetch.cancel()
    assert waited_for(lambda: threading.active_count() == before)
    assert items.read <= 3 and not fetch.ready
