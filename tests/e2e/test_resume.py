"""A job of torchrun that lost a rank and was started again ends as the one left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ext.upstream.checkpoint_folder import complete_steps, folder_of
from tests.ranks import ENVIRONMENT, ROOT, RankPool
from tests.upstream import checkpoint_jobs as jobs
from tests.upstream.checkpoint_jobs import DROPOUT

OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
LAST, KILLED_AFTER = 9, 4
MORE = [*DROPOUT, *OVERLAP, "--train-iters", str(LAST), "--keep-checkpoints", "1"]
STARTUP_SECONDS = 200
DEAD_RANK_SECONDS = 60


def start(run: Path, *, more: Sequence[str] = MORE) -> subprocess.Popen:
    """The job on two ranks, as a user starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "pretrain_rl.py", *jobs.flags_of(run, *more)]
    log = (run.parent / "log").open("ab")
    with log:
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=log, stderr=log
        )


def logged(run: Path) -> int:
    """Steps that the job has logged so far."""
    file = run / "out" / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def wait(process: subprocess.Popen, seconds: float) -> bool:
    """Whether the process ends within this time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def children_of(pid: int) -> list[int]:
    """Processes that this one started, in their order."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for file in files for child in file.read_text().split())


def kill_one_rank(process: subprocess.Popen) -> None:
    """SIGKILL to one rank: the job must end by itself, and not as if all were well."""
    os.kill(children_of(process.pid)[-1], signal.SIGKILL)
    assert process.wait(DEAD_RANK_SECONDS) != 0


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes in /proc")
def test_a_rank_killed_at_a_random_moment(ranks: RankPool, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ranks(2).run(jobs.train, jobs.flags_of(whole, *MORE))
    draw = random.Random(11)
    job = start(killed)
    for _ in range(STARTUP_SECONDS * 20):
        if logged(killed) >= KILLED_AFTER or wait(job, 0.05):
            break
    assert not wait(job, draw.uniform(0, 0.2)), (tmp_path / "log").read_text()[-4000:]
    kill_one_rank(job)
    assert len(complete_steps(killed / "saved")) in (1, 2)
    assert start(killed).wait(STARTUP_SECONDS) == 0, (tmp_path / "log").read_text()[-4000:]
    pair = [folder_of(run / "saved", LAST) for run in (whole, killed)]
    assert ranks(1).run(jobs.differences, *pair) == [[]]
    assert jobs.metrics(killed) == jobs.metrics(whole)
