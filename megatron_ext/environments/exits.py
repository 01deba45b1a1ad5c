"""What would end the process, called by an environment or a reward, ends that call only.

`os._exit` and `os.abort` cannot be caught, so while `contained()` is open they raise `EndsProcess`
in the threads that are in a call (`in_call`).  In every other thread, and in a process that was
forked from a call, they are what they were.
Exceptions such as `SystemExit` and `KeyboardInterrupt` are the call's own too, unless the handler
of a signal raised them (`SignalErrors`): a real Ctrl-C ends the run.
Invariant the tests check: functions and handlers are put back.
Not covered: ends from C (a crash, `os.kill` of the own process, the kernel without memory), and
threads that a call has started itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_NAMES = ("_exit", "abort")
_SIGNALS = tuple(
    number
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if (number := getattr(signal, name, None)) is not None
)
_state = threading.local()
_lock = threading.RLock()  # a forgotten `TimedCalls` may be closed inside of another's block
_kept: dict[str, Callable[..., Any]] = {}
_num_open = 0


class EndsProcess(BaseException):
    """The call asked for the end of the process; not an `Exception`, as it would not come back."""


@contextmanager
def in_call() -> Iterator[None]:
    """A block of this thread in which code of an environment or a reward runs."""
    before = getattr(_state, "is_in_call", False)
    _state.is_in_call = True
    try:
        yield
    finally:
        _state.is_in_call = before


@contextmanager
def contained() -> Iterator[None]:
    """See the module; may be open several times, in several threads."""
    open_container()
    try:
        yield
    finally:
        close_container()


def open_container() -> None:
    """Begin what `close_container` ends; the two are called equally often."""
    global _num_open
    with _lock:
        _num_open += 1
        if _num_open == 1:
            for name in _NAMES:
                _kept[name] = getattr(os, name)
                setattr(os, name, _raising(name, _kept[name]))


def close_container() -> None:
    """End one `open_container`; the last one puts the functions back."""
    global _num_open
    with _lock:
        _num_open -= 1
        while _num_open == 0 and _kept:
            setattr(os, *_kept.popitem())


def _raising(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    owner = os.getpid()

    def ends(*args: Any, **kwargs: Any) -> Any:
        if getattr(_state, "is_in_call", False) and os.getpid() == owner:
            given = ", ".join(map(repr, args))
            raise EndsProcess(f"os.{name}({given}) would have ended the whole run")
        return real(*args, **kwargs)

    return ends


class SignalErrors:
    """Knows the exception that a signal's handler raised while the block ran.

    Only the main thread handles signals; in another thread nothing is known, and none comes.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._handlers: dict[int, Any] = {}

    def __contains__(self, error: BaseException) -> bool:
        """Whether the error came from a signal."""
        return error is self._error

    def __enter__(self) -> SignalErrors:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        with ExitStack() as stack:
            stack.push(self._note)
            self._handlers[number](number, frame)

    def _note(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._error = error or self._error
