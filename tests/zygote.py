"""The process that the ranks of a test are forked from, so that no rank pays for imports.

It imports torch and Megatron once, starts no thread, then waits for jobs on a socket: for each it
forks one child a rank, watches them, and answers how each ended.  The other end is tests/ranks.py.
Checked in test_zygote.py: no rank outlives its job, nor this process, nor pytest.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from tests.rank_process import Attempt, Finish, Job, run_rank

GRACE_SECONDS = 1.5
"""How long the others may go on after the first rank failed, to report their own tracebacks."""
DUMP_SECONDS = 1.0
"""How long a rank that is told to end may take to write its Python stack before it is killed."""

Running = dict[int, tuple[int, int]]
"""(rank, pid) by pidfd, a descriptor that becomes readable when its process ends."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """First message of the zygote, after its imports."""

    num_threads: int
    """Threads of the process; more than 1 makes a fork unsafe."""
    skipped: dict[str, str]
    """Modules of the preload list that failed to import, with their tracebacks."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How the process of one rank ended."""

    rank: int
    code: int
    """Exit code, or minus the signal."""
    was_ended: bool
    """Whether the zygote ended it: the time was up, or the grace after another rank's failure."""
    at: float
    """time.monotonic() of the end."""


def preload(names: Iterable[str]) -> Ready:
    """Import modules (`package.*`: all modules of a package); broken ones are left to the ranks.

    `module:function` also calls the function, which caches what every rank would work out.
    """
    skipped: dict[str, str] = {}

    def load(name: str) -> None:
        with Attempt() as attempt:
            name, _, function = name.partition(":")
            module = importlib.import_module(name)
            if function:
                getattr(module, function)()
        if attempt.error is not None:
            skipped[name] = attempt.traceback()

    for name in names:
        package = name.removesuffix(".*")
        load(package)
        if name != package and package in sys.modules:
            path = sys.modules[package].__path__
            for found in pkgutil.walk_packages(path, package + ".", onerror=load):
                load(found.name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what the imports made is never collected, so its pages stay shared with the ranks
    return Ready(num_threads=len(os.listdir("/proc/self/task")), skipped=skipped)


def fork_ranks(job: Job, connection: Connection) -> Running:
    """Start the ranks of a job."""
    zygote_pid = os.getpid()
    with socket.socket() as probe:  # for code that reads the variables; the ranks do not meet there
        probe.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    read_end, write_end = os.pipe()
    finish = Finish(read_end=read_end, write_end=write_end)
    running: Running = {}
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(job.size):
        pid = os.fork()
        if pid == 0:
            connection.close()
            run_rank(rank, job=job, finish=finish, zygote_pid=zygote_pid)
        running[os.pidfd_open(pid)] = (rank, pid)
    os.close(read_end)
    os.close(write_end)
    return running


def wait_for_exits(running: Running, deadline: float) -> list[int]:
    """Pidfds of the processes that ended, as soon as there are any; empty at the deadline."""
    ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
    return [pidfd for pidfd in ready if isinstance(pidfd, int)]


def reap(running: Running, pidfd: int, *, was_ended: bool) -> Exit:
    """Take an ended process off the list, and kill whatever it left running."""
    rank, pid = running.pop(pidfd)
    at = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    return Exit(rank=rank, code=os.waitstatus_to_exitcode(status), was_ended=was_ended, at=at)


def end_all(running: Running) -> list[Exit]:
    """End every rank: first with the signal that makes it write its stack, then without asking."""
    exits: list[Exit] = []
    deadline = time.monotonic() + DUMP_SECONDS
    for number in (signal.SIGUSR1, signal.SIGKILL):
        for pidfd in running:
            signal.pidfd_send_signal(pidfd, number)
        while running and (ended := wait_for_exits(running, deadline)):
            exits += [reap(running, pidfd, was_ended=True) for pidfd in ended]
        deadline += 60.0  # far beyond what a kill takes
    return exits


def supervise(job: Job, connection: Connection) -> list[Exit]:
    """Run a job until all ranks are done, or one failed and the grace is over, or the time is up.

    Raises EOFError, with all ranks ended, when the pytest at the other end is gone.
    """
    running = fork_ranks(job, connection)
    exits: list[Exit] = []
    deadline = time.monotonic() + job.timeout
    while running:
        ready = wait([connection, *running], timeout=max(0.0, deadline - time.monotonic()))
        if connection in ready:
            end_all(running)
            raise EOFError("pytest closed the connection during a job")
        if not ready:
            return exits + end_all(running)
        for pidfd in wait_for_exits(running, 0.0):
            exits.append(reap(running, pidfd, was_ended=False))
            if not (job.folder / f"{exits[-1].rank}.result").exists():
                deadline = min(deadline, exits[-1].at + GRACE_SECONDS)
    return exits


def main(descriptor: int, folder: str) -> None:
    """Serve jobs from the socket `descriptor` until it closes, then remove the ranks' `folder`."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send(preload(connection.recv()))
        while True:
            connection.send(supervise(connection.recv(), connection))
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # taking the interpreter down would take half a second
