"""The processes behind the ranks: none outlives its job or owner, and a lost zygote is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rank_report import RanksFailed
from tests.ranks import ROOT, RankPool


def start_a_process() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def kill_the_zygote() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int], *, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    return not any(map(is_alive, pids))


def check_recovered(pool: RankPool) -> None:
    """The next job works and leaves no process behind."""
    assert pool(2).run(abs, -1) == [1, 1]
    assert children(pool.start().process.pid) == []


@pytest.fixture(scope="module")
def spare_pool() -> Iterator[RankPool]:
    """A pool without Megatron, quick to start again, for tests that end its zygote."""
    pool = RankPool(preload=("no_such_module",))
    yield pool
    pool.close()


def test_the_zygote_is_safe_to_fork_and_has_imported_everything(ranks):
    ready = ranks.start().ready()
    assert ready.num_threads == 1
    assert ready.skipped == {}


def test_what_a_rank_started_ends_with_it(ranks):
    assert wait_until_gone(ranks(2).run(start_a_process))


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_a_suspect(spare_pool):
    with pytest.raises(RanksFailed, match="not importable in advance: no_such_module"):
        spare_pool(1).run(int, "x")


@pytest.mark.slow
def test_a_dead_zygote_is_replaced(spare_pool):
    zygote = spare_pool.start()
    zygote.process.kill()
    zygote.process.wait()
    check_recovered(spare_pool)
    assert not zygote.folder.exists()


@pytest.mark.slow
def test_a_zygote_that_dies_in_a_job_is_told_and_replaced(spare_pool):
    with pytest.raises(RanksFailed, match="zygote died while running a job, with exit code -9"):
        spare_pool(2).run(kill_the_zygote)
    check_recovered(spare_pool)


def test_an_interrupted_job_is_ended(spare_pool):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    zygote = spare_pool.start()
    zygote.ready()
    previous = signal.signal(signal.SIGUSR2, interrupt)  # SIGINT is ignored in background jobs
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    with pytest.raises(KeyboardInterrupt):
        spare_pool(2).run(signal.pause)
    signal.signal(signal.SIGUSR2, previous)
    pids = [int(pid) for pid in children(zygote.process.pid)]
    assert len(pids) == 2
    assert spare_pool.start() is not zygote
    assert wait_until_gone([zygote.process.pid, *pids], seconds=0.0)


@pytest.mark.slow
def test_ranks_do_not_outlive_pytest():
    program = (
        "import signal\n"
        "from tests.ranks import RankPool\n"
        "pool = RankPool(preload=())\n"
        "zygote = pool.start()\n"
        "zygote.ready()\n"
        "print(zygote.process.pid, zygote.folder, flush=True)\n"
        "pool(2).run(signal.pause)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        while len(children(int(pid))) < 2:
            threading.Event().wait(0.02)
        pids = [int(pid), *map(int, children(int(pid)))]
        owner.kill()
    assert wait_until_gone(pids)
    assert not Path(folder).exists()
