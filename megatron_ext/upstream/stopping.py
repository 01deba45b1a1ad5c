"""Ends a run as it was told to: by a signal, after some time, or at a step; the same on all ranks.

SIGTERM, SIGINT and SIGHUP (and --exit-signal) only set a mark here.  A rank tells the others
through the job's store, so that replicas in a rollout notice within seconds, whoever got the
signal; what counts is agreed on in one small all-reduce a step.  A second SIGINT kills at once.
Invariant the tests check: stopped and resumed == uninterrupted, bit for bit.
Not covered: a step of supervised training, or an update, is not left in its middle.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from argparse import Namespace
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.report.sink import RunStopped

POLL_SECONDS = 1.0
"""How often the store is asked whether another rank was told to end."""
_INTERVAL, _DURATION, _SIGNAL = 1, 2, 100
"""Codes of reasons; a signal's is its number added to the last."""
_DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_numbers = itertools.count()


class Stopping:
    """What may end a run early; a context, in which signals are taken."""

    def __init__(self, args: Namespace) -> None:
        """On every rank of the job, after it was joined."""
        self._interval: int | None = args.exit_interval
        minutes = args.exit_duration_in_mins
        self._deadline = time.monotonic() + 60 * minutes if minutes else float("inf")
        wanted = {*_DEFAULT_SIGNALS, *([args.exit_signal] if args.exit_signal_handler else [])}
        self._signals = sorted(wanted)
        self._is_writer = dist.get_rank() == 0
        self._number = 0
        self._before: dict[signal.Signals, Any] = {}
        # documented nowhere, but where a rank's object collectives meet, too
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"megatron_ext/stop/{next(_numbers)}"
        self._is_known = False
        self._next_look = 0.0

    def is_asked(self) -> bool:
        """Whether some rank was told to end, as far as this one knows."""
        if self._is_known:
            return True
        now = time.monotonic()
        if self._number or now >= self._deadline:
            self._store.set(self._key, "1")
            self._is_known = True
        elif now >= self._next_look:
            self._next_look = now + POLL_SECONDS
            self._is_known = dist.get_world_size() > 1 and self._store.check([self._key])
        return self._is_known

    def is_agreed(self) -> bool:
        """Whether any rank was told to end; the same on all.  Collective."""
        return self.agree(step=0)[0] > 0

    def agree(self, *, step: int, also: bool = False) -> tuple[int, bool]:
        """The strongest reason of all ranks to end after a step, as a code (0 = none), and whether
        any rank says `also`.  Collective."""
        code = 0
        if self._interval and step and step % self._interval == 0:
            code = _INTERVAL
        if time.monotonic() >= self._deadline:
            code = _DURATION
        if self._number:
            code = _SIGNAL + self._number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        values = torch.tensor([code, int(also)], device=device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        agreed, is_any = values.tolist()
        return agreed, bool(is_any)

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup, a shell's background job
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self._is_writer and not self._number:  # no logging: it may be at work right now
            name = signal.Signals(number).name
            again = ", another one ends it at once" if number == signal.SIGINT else ""
            os.write(2, f"{name}: the run ends as soon as it can be continued{again}\n".encode())
        self._number = self._number or number


def stopped(code: int, *, step: int, is_saved: bool) -> RunStopped:
    """The end of a run for the reason of that code, after so many finished steps.

    Its exit code: 128 + the signal's number, as a shell has it, so that a queue knows that there is
    more to do; 0 where the run's own flags asked for the end, as Megatron has it.
    """
    why, exit_code = f"the time of --exit-duration-in-mins was up after step {step}", 0
    if code >= _SIGNAL:
        number = code - _SIGNAL
        why, exit_code = (
            f"{signal.Signals(number).name} came; step {step} was the last",
            128 + number,
        )
    elif code == _INTERVAL:
        why = f"step {step} is one of --exit-interval"
    more = "nothing was saved"
    if is_saved:
        more = f"the checkpoint of step {step} is saved, and the same command goes on from it"
    return RunStopped(f"{why}; {more}", exit_code=exit_code)
