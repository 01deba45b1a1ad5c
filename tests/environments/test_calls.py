"""Calls that raise or hang cost themselves only."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from megatron_ext.environments.calls import Failure, TimedCalls, call_in_place


def broken():
    raise KeyError("no such thing")


def spin():
    while True:
        pass


@pytest.fixture
def timed():
    """Two threads, and a fifth of a second a call."""
    calls = TimedCalls(workers=2, time_limit=0.2)
    yield calls
    calls.close()


@pytest.mark.parametrize("how", ["in place", "timed"])
def test_results_and_failures_come_in_order(timed, how):
    call = call_in_place if how == "in place" else timed
    first, second, third = call([lambda: 1, broken, lambda: None])
    assert (first, third) == (1, None)
    assert isinstance(second, Failure)
    assert second.reason.startswith("KeyError: 'no such thing' (test_calls.py:")
    assert call([]) == []


def test_hanging_calls_are_given_up_and_the_others_go_on(timed):
    never = threading.Event()
    calls = [never.wait, spin, *[lambda i=i: i for i in range(20)], never.wait, lambda: "last"]
    started = time.monotonic()
    outcomes = timed(calls)
    assert time.monotonic() - started < 10  # 0.4 s without other load
    assert outcomes[2:22] == list(range(20)) and outcomes[23] == "last"
    for place in (0, 1, 22):
        assert outcomes[place] == Failure(reason="no result within 0.2 seconds")
    never.set()
    assert timed([lambda: "again"]) == ["again"]


def test_a_thread_that_spins_is_ended(timed):
    threads: list[threading.Thread] = []

    def remember_and_spin():
        threads.append(threading.current_thread())
        spin()

    timed([remember_and_spin])
    threads[0].join(timeout=20)
    assert not threads[0].is_alive()


def test_too_many_hanging_threads_are_an_error():
    calls = TimedCalls(workers=8, time_limit=0.02)
    never = threading.Event()
    with pytest.raises(RuntimeError, match="calls of environments hang"):
        calls([never.wait] * 80)
    never.set()
    calls.close()


def test_calls_run_side_by_side(timed):
    barrier = threading.Barrier(2)
    assert sorted(timed([barrier.wait, barrier.wait])) == [0, 1]


def test_threads_end_with_the_calls():
    """When they are closed, and when they are forgotten."""
    before = set(threading.enumerate())
    with TimedCalls(workers=2, time_limit=5) as calls:
        calls([lambda: 1])
        closed = set(threading.enumerate()) - before
    calls.close()  # once more does nothing
    forgotten = TimedCalls(workers=3, time_limit=5)
    more = set(threading.enumerate()) - before - closed
    del forgotten
    gc.collect()
    for thread in closed | more:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert len(closed) == 2 and len(more) == 3


def test_limits_that_let_nothing_through_are_refused():
    with pytest.raises(ValueError, match="0 workers and a time limit"):
        TimedCalls(workers=0, time_limit=1)
