"""The life of one rank of a distributed test, from the fork off the zygote to its exit.

A rank leaves files in its job's folder: RANK.result or RANK.error, RANK.output, and RANK.stack when
it was told to end.  The result appears whole or not at all, so its presence means success.
Not covered: CUDA, which cannot be used after a fork; it is hidden from the ranks.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import os
import pickle
import random
import resource
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

GLOO_SHARE = 0.8
"""Part of a job's time limit after which a collective gives up, so that it reports itself."""
LINGER_SECONDS = 10.0
"""How long a rank that returned keeps its connections for those that did not: they may still be
connecting to it.  Not for ever, so that a collective it left out fails before it times out."""
SEED = 1234
"""Seed of torch, numpy and random in every rank."""
PR_SET_PDEATHSIG = 1
"""linux/prctl.h: the signal a process gets when its parent dies."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One function to run on `size` ranks."""

    call: bytes
    """Pickle of (function, args, kwargs); opened in the ranks only, as it imports test modules."""
    size: int
    """Number of ranks."""
    timeout: float
    """Seconds from the first fork until every rank that still runs is ended."""
    folder: Path
    """Where the ranks leave their files."""
    sys_path: list[str]
    """Import path of the ranks, as pytest set it up."""


class Attempt:
    """Context manager that keeps whatever its block raised, for another process to read."""

    error: BaseException | None = None
    at: float = 0.0

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        self.error, self.at = error, time.monotonic()
        return True

    def traceback(self) -> str:
        """Formatted traceback without the frame that holds the `with`."""
        if self.error is None:
            return ""
        trace = self.error.__traceback__
        inner = trace.tb_next if trace is not None and trace.tb_next is not None else trace
        return "".join(traceback.format_exception(type(self.error), self.error, inner))


@dataclass(frozen=True, kw_only=True)
class Finish:
    """A pipe that every rank of a job holds open at both ends until it returns, or dies."""

    read_end: int
    write_end: int

    def wait_for_all(self) -> None:
        """Return when no rank is at work any more, or after LINGER_SECONDS."""
        os.close(self.write_end)
        select.select([self.read_end], [], [], LINGER_SECONDS)  # readable: closed by all


def run_rank(rank: int, *, job: Job, finish: Finish, zygote_pid: int) -> NoReturn:
    """Run the job's function as rank `rank` in this process, a fresh fork, and exit."""
    code = 1
    try:
        with Attempt() as attempt:
            isolate(rank, job=job, zygote_pid=zygote_pid)
            sys.path[:] = job.sys_path
            function, args, kwargs = pickle.loads(job.call)
            join(rank, job=job)
            save(function(*args, **kwargs), job.folder / f"{rank}.result")
            finish.wait_for_all()
            code = 0
        if attempt.error is not None:
            report = (attempt.at, is_peer_loss(attempt.error), attempt.traceback())
            (job.folder / f"{rank}.error").write_bytes(pickle.dumps(report))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def isolate(rank: int, *, job: Job, zygote_pid: int) -> None:
    """Tie this process to its zygote's life, and its output and crash report to the job folder."""
    os.setsid()  # a group of its own, so that what the rank starts can be killed with it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote_pid:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.open(job.folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  open as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  open as long as the process
    faulthandler.enable(file=2)
    # chained to the default action: the signal writes the stack, then ends the process
    stack = os.open(job.folder / f"{rank}.stack", os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True, chain=True)


def join(rank: int, *, job: Job) -> None:
    """Make this process a member of the job's gloo group; they meet in a file, not at a port."""
    import numpy
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(job.size), LOCAL_WORLD_SIZE=str(job.size))
    torch.manual_seed(SEED)
    numpy.random.seed(SEED)
    random.seed(SEED)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(job.folder / "store"), job.size),
        rank=rank,
        world_size=job.size,
        timeout=datetime.timedelta(seconds=GLOO_SHARE * job.timeout),
    )


def save(result: object, path: Path) -> None:
    """Write a result, tensors by value, whole or not at all."""
    import torch

    partial = path.with_suffix(".partial")
    torch.save(result, partial)
    partial.rename(path)


def is_peer_loss(error: BaseException) -> bool:
    """Whether the error says no more than that another rank went away, or did not come."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
