"""Threads that plan: who makes which call, when, and what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from distcache.planner.threads import Threads

LIMIT_S = 30.0


@contextmanager
def several(count: int) -> Iterator[Threads]:
    """So many threads, which have ended afterwards."""
    threads, before = Threads(count), threading.active_count()
    yield threads
    threads.close()
    assert threading.active_count() == before - count + 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_are_in_order_and_the_first_error_is_raised_when_all_calls_are_over(count) -> None:
    over = []

    def call(number: int, bad: int) -> int:
        over.append(number)
        if number >= bad:
            raise ValueError(f"call {number}")
        return number * number

    with several(count) as threads:
        assert threads.each(call, [(n, 9) for n in range(7)]) == [n * n for n in range(7)]
        over.clear()
        with pytest.raises(ValueError, match="call 3"):
            threads.each(call, [(n, 3) for n in range(7)])
        assert count == 1 or sorted(over) == list(range(7))


@pytest.mark.parametrize("count", [2, 3])
def test_all_threads_make_calls_at_the_same_time(count) -> None:
    together = threading.Barrier(count)

    def call(number: int) -> int:
        together.wait(LIMIT_S)  # until all are here
        return threading.get_ident()

    with several(count) as threads:
        who = threads.each(call, [(n,) for n in range(count)])
        assert len(set(who)) == count and threading.get_ident() in who


def test_what_is_begun_is_made_beside_by_one_thread_in_order() -> None:
    may, seen = threading.Event(), []

    def call(number: int) -> int:
        assert may.wait(LIMIT_S) and threads.run_here()
        seen.append((number, threading.get_ident()))
        return number

    with several(3) as threads:
        wanted = [threads.begin(call, number) for number in range(4)]
        assert not seen and not threads.run_here()
        may.set()  # which the one that wants a result could not do first
        assert [want() for want in wanted] == [0, 1, 2, 3] == [number for number, _ in seen]
        assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1
        with pytest.raises(ZeroDivisionError):
            threads.begin(divmod, 1, 0)()
        slow = threads.begin(threading.Event().wait, 0.2)
        threads.settle()
        assert slow() is False


@pytest.mark.parametrize(
    ("count", "most", "work", "calls"),
    [
        (1, 16, 90, 1),
        (2, 16, 0.9, 1),  # not worth a word to another thread
        (2, 16, 3, 2),
        (2, 16, 7.5, 6),  # of which each makes as many, if all take as long
        (2, 4, 90, 4),
        (14, 16, 90, 14),
        (14, 16, 5.5, 5),
    ],
)
def test_work_is_divided_as_far_as_it_is_worth_it(monkeypatch, count, most, work, calls) -> None:
    monkeypatch.setattr(Threads, "least_s", 0.01)
    with several(count) as threads:
        assert threads.calls(most, 0.01 * work) == calls
        ranges = threads.ranges(most, 0.01 * work)
    assert len(ranges) == calls and [ranges[0][0], ranges[-1][1]] == [0, most]
    assert all(first < last for first, last in ranges)
    assert [last for _, last in ranges[:-1]] == [first for first, _ in ranges[1:]]


@pytest.mark.parametrize(("reading", "calls", "woken"), [
    (False, 2, [3]), (False, 3, [2, 3]), (False, 9, [1, 2, 3]),
    (True, 2, [2]), (True, 3, [2, 3]), (True, 9, [2, 3]),
])  # fmt: skip
def test_no_more_threads_are_woken_than_there_are_calls(reading, calls, woken) -> None:
    """And last the first of the others, which may be reading; of what that one shares, others than
    those that the planner shares with."""
    asked: list[int] = []

    class ExchangeReply(SimpleQueue):
        """A queue that says whose it is when it is put to."""

        def __init__(self, number: int) -> None:
            self.number = number

        def put(self, shared: object) -> None:
            asked.append(self.number)

    with several(4) as threads:
        first = threading.current_thread() if reading else threads._threads[0]
        every, queues = [first, *threads._threads[1:]], map(ExchangeReply, (1, 2, 3))
        threads._others = list(zip(every, queues, strict=True))
        assert threads.each(abs, [(-n,) for n in range(calls)]) == list(range(calls))
    assert asked == woken


def test_threads_end_with_what_runs_them() -> None:
    before = set(threading.enumerate())
    threads = Threads(3)
    assert threads.each(abs, [(-1,), (2,)]) == [1, 2]
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    del threads
    for thread in own:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_alone_what_is_begun_is_made_when_it_is_wanted() -> None:
    seen: list[int] = []
    with several(1) as threads:
        wanted = threads.begin(seen.append, 1)
        threads.settle()
        assert seen == []
        wanted()
        assert seen == [1] and not threads.run_here()


@pytest.mark.parametrize("count", [2, 3])
def test_both_sides_share_calls_at_the_same_time(count) -> None:
    """A thread that waits for calls of its own never waits for those of the other side."""

    def squares(size: int) -> list[int]:
        return threads.each(lambda n: n * n, [(n,) for n in range(size)])

    with several(count) as threads:
        for size in range(1, 60):
            wanted = threads.begin(squares, size)
            assert squares(size + 1) == [n * n for n in range(size + 1)]
            assert wanted() == [n * n for n in range(size)]
