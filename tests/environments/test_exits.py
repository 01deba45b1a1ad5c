"""Ends of the process that a call asks for; signals and other threads are left alone."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

import pytest

from megatron_ext.environments import exits
from megatron_ext.environments.calls import Failure, TimedCalls, call_in_place


def test_ctrl_c_goes_on():
    """A real one, which comes by a signal, ends the run; also one that a handler makes of it."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        call_in_place([lambda: signal.raise_signal(signal.SIGINT), lambda: 1])
    assert signal.getsignal(signal.SIGINT) is before

    def ends(number, frame):
        sys.exit(128 + number)

    old = signal.signal(signal.SIGTERM, ends)
    try:
        with pytest.raises(SystemExit, match="143"):
            call_in_place([lambda: signal.raise_signal(signal.SIGTERM)])
        assert signal.getsignal(signal.SIGTERM) is ends
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_signal_that_raises_nothing_changes_nothing():
    """A handler that only takes a note, as of a checkpoint that is wanted."""
    told = []
    old = signal.signal(signal.SIGUSR1, lambda *_: told.append(1))

    def handled_while_handling():
        try:
            raise KeyError("a")
        except KeyError:
            signal.raise_signal(signal.SIGUSR1)
            raise

    try:
        (outcome,) = call_in_place([handled_while_handling])
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert told == [1]
    assert isinstance(outcome, Failure) and outcome.reason.startswith("KeyError: 'a'")


def test_only_threads_in_a_call_are_kept_from_ending_the_process():
    gc.collect()  # calls that another test has forgotten
    real = os._exit, os.abort
    with exits.contained():
        guarded = os._exit
        assert guarded is not real[0]
        with TimedCalls(workers=1, time_limit=5), exits.contained():
            assert os._exit is guarded
        found: list[object] = []

        def call():
            with exits.in_call():
                try:
                    os._exit(1)
                except exits.EndsProcess as error:
                    found.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert found == ["os._exit(1) would have ended the whole run"]
        assert os._exit is guarded
        pid = os.fork()  # a thread outside every call: the real one
        if pid == 0:
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert (os._exit, os.abort) == real
