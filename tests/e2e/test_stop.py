"""R3, R8 as a user has it: signals to torchrun, and a torchrun that is killed alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_ext.upstream.checkpoint_folder import complete_steps, folder_of
from tests.e2e.test_resume import DEAD_RANK_SECONDS, STARTUP_SECONDS, children_of, logged, wait
from tests.e2e.test_resume import start as start_job
from tests.ranks import RankPool
from tests.upstream import checkpoint_jobs as jobs

LONG = ["--train-iters", "400", "--save-interval", "1000", "--lr-decay-iters", "400"]


def start(run: Path, *more: str) -> subprocess.Popen:
    """A job on two ranks that would take long, and saves at its end only."""
    return start_job(run, more=[*jobs.DROPOUT, *LONG, *more])


def wait_for_steps(job: subprocess.Popen, run: Path, *, count: int) -> None:
    """Until the job has logged so many steps."""
    for _ in range(STARTUP_SECONDS * 20):
        if logged(run) >= count or wait(job, 0.05):
            break
    assert job.poll() is None, (run.parent / "log").read_text()[-4000:]


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes in /proc")
def test_r8_r3_sigterm_to_torchrun_saves_and_ranks_do_not_outlive_it(
    ranks: RankPool, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    job = start(run)
    wait_for_steps(job, run, count=2)
    job.send_signal(signal.SIGTERM)
    job.wait(DEAD_RANK_SECONDS)
    [step] = complete_steps(run / "saved")
    record = json.loads((run / "out" / "config.json").read_text())
    assert record["reason"].startswith(f"SIGTERM came; step {step} was the last; the checkpoint")
    assert logged(run) == step

    job = start(run)
    wait_for_steps(job, run, count=step + 2)
    orphans = children_of(job.pid)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    for _ in range(100):
        if all(map(is_gone, orphans)):
            break
        time.sleep(0.1)  # for processes that are nobody's children any more
    assert all(map(is_gone, orphans)), "ranks live on"
    assert "torchrun (process" in log.read_text()

    last = ["--train-iters", str(step + 3), "--save-interval", "1000"]
    whole = tmp_path / "whole"
    ranks(2).run(jobs.train, jobs.flags_of(whole, *jobs.DROPOUT, *LONG, *last))
    assert start(run, *last).wait(STARTUP_SECONDS) == 0, log.read_text()[-4000:]
    pair = [folder_of(folder / "saved", step + 3) for folder in (whole, run)]
    assert ranks(1).run(jobs.differences, *pair) == [[]]
    assert jobs.metrics(run) == jobs.metrics(whole)
