"""A job of torchrun that is killed again and again ends as the one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.upstream.checkpoint_folder import complete_steps, folder_of
from tests.ranks import ENVIRONMENT, ROOT, RankPool
from tests.upstream import checkpoint_jobs as jobs
from tests.upstream.checkpoint_jobs import DROPOUT

OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
LAST = 12
MORE = [*DROPOUT, *OVERLAP, "--train-iters", str(LAST), "--keep-checkpoints", "1"]
STARTUP_SECONDS = 200


def start(run: Path) -> subprocess.Popen:
    """The job on two ranks, as a user starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "pretrain_rl.py", *jobs.flags_of(run, *MORE)]
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


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to the job's processes, which are all below this one."""
    doomed = [process.pid]
    for pid in doomed:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            doomed += map(int, children.read_text().split())
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes in /proc")
def test_killed_at_random_moments(ranks: RankPool, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ranks(2).run(jobs.train, jobs.flags_of(whole, *MORE))
    draw = random.Random(11)
    for goal in (3, 7):
        job = start(killed)
        for _ in range(STARTUP_SECONDS * 20):
            if logged(killed) >= goal or wait(job, 0.05):
                break
        assert not wait(job, draw.uniform(0, 0.2)), (tmp_path / "log").read_text()[-4000:]
        kill(job)
        assert len(complete_steps(killed / "saved")) in (1, 2)
    assert start(killed).wait(STARTUP_SECONDS) == 0, (tmp_path / "log").read_text()[-4000:]
    pair = [folder_of(run / "saved", LAST) for run in (whole, killed)]
    assert ranks(1).run(jobs.differences, *pair) == [[]]
    assert jobs.metrics(killed) == jobs.metrics(whole)
