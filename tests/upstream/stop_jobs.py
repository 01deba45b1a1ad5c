"""What a rank does in the tests of runs that end early: commands that get a signal on their way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from shlex import split
from typing import Any

import pretrain_rl
from megatron_ext.files import lock
from megatron_ext.rl import learning, loop
from megatron_ext.rollout.session import RolloutSession
from megatron_ext.upstream import saving
from tests.upstream.rl_jobs import SMALL, refusal

# a random policy earns nothing, but the entropy term trains it in every step
REINFORCE = split(
    "--tasks arithmetic --algorithm grpo --entropy-coefficient 0.05 --group-size 2 "
    "--global-batch-size 4 --train-iters 4 --lr 1e-3 --rollout-max-new-tokens 12 "
    "--eval-every 2 --eval-count 4"
)


def flags_of(run: Path, *more: str) -> list[str]:
    """A command that starts or continues the run in a folder."""
    saved = ("--save", str(run / "saved"), "--load", str(run / "saved"))
    return [*SMALL, *REINFORCE, *saved, "--output-dir", str(run), *more]


def run(flags: list[str]) -> int:
    """The exit code of a command."""
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    code = pretrain_rl.main(flags)
    assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    return code


def signalled(flags: list[str], *, rank: int, number: int, place: str, count: int) -> int:
    """The exit code of a command whose one rank gets a signal in the middle of its run.

    place: what of our code is called for the count-th time when the signal comes.
    """
    owner: Any = {
        "step": RolloutSession,
        "learn": loop,
        "score_episodes": learning,
        "_remember_random": saving.Checkpoints,
    }[place]
    if rank == int(os.environ["RANK"]):
        setattr(owner, place, _with_signal(getattr(owner, place), number=number, count=count))
    return run(flags)


def _with_signal(function: Callable, *, number: int, count: int) -> Callable:
    calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return called


def with_slow_sampling(flags: list[str], *, seconds: float, rank: int, number: int) -> float:
    """How long a command goes on after one rank got a signal in a rollout of so many seconds a
    token, on every rank."""
    told = [0.0]
    step = RolloutSession.step

    def slow(session: RolloutSession) -> Any:
        if not told[0]:
            told[0] = time.monotonic()
            if rank == int(os.environ["RANK"]):
                os.kill(os.getpid(), number)
        time.sleep(seconds)
        return step(session)

    RolloutSession.step = slow  # type: ignore[method-assign]
    run(flags)
    return time.monotonic() - told[0]


def impatient_refusal(flags: list[str]) -> str:
    """What a command says whose folder another run holds, without the usual wait."""
    lock.PATIENCE_SECONDS = 0.0
    return refusal(flags)


def full_reference(flags: list[str]) -> str:
    """What a command says where no file may have more than 20 kB."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return refusal(flags)
