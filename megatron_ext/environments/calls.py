"""Calls of code that may raise or hang: each ends in its result or in a `Failure`, in bounded time.

Invariants the tests check: one bad call costs itself only; results come in the order of the calls.
A call that hangs is given up, not ended for certain: its thread is sent SystemExit, which ends what
runs in Python but not what waits in C.  Too many of those are an error.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

logger = logging.getLogger(__name__)

MOST_HANGING_THREADS = 64


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A call without a result."""

    reason: str


class Attempt:
    """A block whose exceptions end it and are kept: someone else's code runs in it.

    This is the boundary at which errors of tasks, environments and rewards become data.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        place = traceback.extract_tb(trace)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        self.failure = Failure(reason=f"{type(error).__name__}: {str(error)[:300]} ({where})")
        logger.debug("a call failed", exc_info=(type(error), error, trace))
        return True


def call_in_place[T](calls: Sequence[Callable[[], T]]) -> list[T | Failure]:
    """The calls' results, one after the other in this thread, without a time limit."""
    return [_attempt(call) for call in calls]


class TimedCalls:
    """Calls in threads, several at a time, each within a time limit."""

    def __init__(self, *, workers: int, time_limit: float) -> None:
        if workers < 1 or not time_limit > 0:
            raise ValueError(
                f"{workers} workers and a time limit of {time_limit} seconds: both must be above 0."
            )
        self._time_limit = time_limit
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [self._new_thread() for _ in range(workers)]
        self._hanging: list[threading.Thread] = []

    def __call__[T](self, calls: Sequence[Callable[[], T]]) -> list[T | Failure]:
        """The calls' results, in their order.

        Raises:
            RuntimeError: over 64 threads hang in calls that were given up.
        """
        jobs = [_Job(call) for call in calls]
        for job in jobs:
            self._jobs.put(job)
        # Jobs start in order, so when a job is waited for, a thread is free for it or has it.
        return [self._outcome(job) for job in jobs]

    def close(self) -> None:
        """Let the threads end; one that hangs ends with the process."""
        for _ in self._threads:
            self._jobs.put(None)
        self._threads = []

    def _outcome[T](self, job: _Job[T]) -> T | Failure:
        job.has_started.wait()
        remaining = job.started_at + self._time_limit - time.monotonic()
        if job.has_ended.wait(max(0.0, remaining)) or not job.give_up():
            assert job.outcome is not None
            return job.outcome[0]
        self._replace(job)
        return Failure(reason=f"no result within {self._time_limit:g} seconds")

    def _replace(self, job: _Job) -> None:
        """A new thread for the one that hangs in a job."""
        assert job.thread is not None and job.thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(job.thread.ident), ctypes.py_object(SystemExit)
        )
        self._threads[self._threads.index(job.thread)] = self._new_thread()
        self._hanging = [t for t in [*self._hanging, job.thread] if t.is_alive()]
        if len(self._hanging) > MOST_HANGING_THREADS:
            raise RuntimeError(
                f"{len(self._hanging)} calls of environments hang, each after its time limit of "
                f"{self._time_limit:g} seconds, and could not be ended. Give what they wait for a "
                "time limit of its own."
            )

    def _new_thread(self) -> threading.Thread:
        thread = threading.Thread(target=_work, args=(self._jobs,), daemon=True)
        thread.start()
        return thread


class _Job[T]:
    """One call on its way through a thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.has_started, self.has_ended = threading.Event(), threading.Event()
        self.started_at = 0.0
        self.thread: threading.Thread | None = None
        self.outcome: tuple[T | Failure] | None = None
        self._call = call
        self._is_settled = threading.Lock()

    def run(self) -> bool:
        """Make the call; whether anyone still waits for it."""
        self.thread, self.started_at = threading.current_thread(), time.monotonic()
        self.has_started.set()
        outcome = _attempt(self._call)
        if not self._is_settled.acquire(blocking=False):
            return False
        self.outcome = (outcome,)
        self.has_ended.set()
        return True

    def give_up(self) -> bool:
        """Stop waiting; False = it has just ended after all."""
        if self._is_settled.acquire(blocking=False):
            return True
        self.has_ended.wait()
        return False


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    with suppress(SystemExit):  # sent to a thread that hangs
        while (job := jobs.get()) is not None and job.run():
            pass


def _attempt[T](call: Callable[[], T]) -> T | Failure:
    with Attempt() as attempt:
        return call()
    assert attempt.failure is not None
    return attempt.failure
