"""Calls of code that may raise or hang: each ends in its result or in a `Failure`, in bounded time.

Invariants the tests check: one bad call costs itself only, whatever it raises, at once; results
come in the order of the calls.
A call that hangs is given up, not ended for certain: its thread is sent SystemExit, which ends what
runs in Python but not what waits in C.  Too many of those are an error.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megatron_ext.environments import exits

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

    def __init__(self, *, is_kept: Callable[[BaseException], bool] | None = None) -> None:
        """is_kept: which exceptions; None = every `Exception`, so neither `SystemExit` nor
        `KeyboardInterrupt`."""
        self.failure: Failure | None = None
        self._is_kept = is_kept or _is_ordinary

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not self._is_kept(error):
            return False
        said = f": {text}" if (text := _text_of(error)) else ""
        self.failure = Failure(reason=f"{type(error).__name__}{said} ({_place_of(trace)})")
        logger.debug("a call failed: %s", self.failure.reason)
        return True


def _is_ordinary(error: BaseException) -> bool:
    return isinstance(error, Exception)


def _text_of(error: BaseException) -> str:
    """What an exception says, shortened; its own code runs, and may be wrong too."""
    with _Dropped():
        return str(error)[:300]
    return "its text cannot be had"


class _Dropped:
    """A block whose exceptions end it and are forgotten."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> bool:
        return True


def _place_of(trace: TracebackType | None) -> str:
    """File and line that raised; of what `exits` raised, those that asked for it."""
    place = "?"
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path != exits.__file__:
            place = f"{Path(path).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


class Clocked[T]:
    """A call that knows how long it has taken."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._started: float | None = None
        self._ended: float | None = None

    def __call__(self) -> T:
        """Make the call."""
        self._started = time.perf_counter()
        try:
            return self._call()
        finally:
            self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of the call, up to now if it goes on; 0 before it."""
        if self._started is None:
            return 0.0
        return (self._ended or time.perf_counter()) - self._started


def call_in_place[T](calls: Sequence[Callable[[], T]]) -> list[T | Failure]:
    """The calls' results, one after the other in this thread, without a time limit.

    Whatever a call raises is its own failure, `SystemExit` too; only what the handler of a signal
    raises meanwhile goes on (Ctrl-C).
    """
    with exits.contained(), exits.SignalErrors() as from_signals:
        return [_attempt(call, is_kept=lambda e: e not in from_signals) for call in calls]


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
        exits.open_container()
        self._end = weakref.finalize(self, _end, self._jobs, workers)
        self._end.atexit = False

    def __enter__(self) -> TimedCalls:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """Let the threads end, as when it is forgotten; one that hangs ends with the process."""
        self._end()

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
        outcome = _attempt(self._call, is_kept=lambda error: True)
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


def _end(jobs: queue.SimpleQueue[_Job | None], workers: int) -> None:
    for _ in range(workers):
        jobs.put(None)
    exits.close_container()


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    with suppress(SystemExit):  # sent to a thread that hangs
        while (job := jobs.get()) is not None and job.run():
            pass


def _attempt[T](call: Callable[[], T], *, is_kept: Callable[[BaseException], bool]) -> T | Failure:
    with Attempt(is_kept=is_kept) as attempt, exits.in_call():
        return call()
    assert attempt.failure is not None
    return attempt.failure
