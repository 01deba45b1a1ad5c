"""A reinforcement-learning job killed in its rollouts and updates ends as one left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.upstream.checkpoint_folder import folder_of
from tests.ranks import ENVIRONMENT, ROOT, RankPool
from tests.upstream import checkpoint_jobs
from tests.upstream.rl_jobs import flags_of, metrics_of, run, warm_start

LAST = 6
KILLED_AFTER = 4
"""Lines of metrics: of the evaluation before the first step, and of steps."""
MORE = ["--train-iters", str(LAST), "--save-interval", "1", "--keep-checkpoints", "2"]
PATIENCE_SECONDS = 200
POLL_SECONDS = 0.02


def start(words: list[str], log: Path) -> subprocess.Popen:
    """One process of the job, as torchrun would start it."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "pretrain_rl.py", *words],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | alone | {"MASTER_PORT": "0"},
            stdout=file,
            stderr=file,
        )


def has_ended(job: subprocess.Popen, seconds: float) -> bool:
    """Whether the job ends within this time."""
    try:
        job.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def lines_of(path: Path) -> int:
    """Lines that the job has written so far."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_a_random_moment(ranks: RankPool, tmp_path: Path) -> None:
    warm, whole, killed = tmp_path / "warm", tmp_path / "whole", tmp_path / "killed"
    ranks(1).run(warm_start, warm, timeout=120)
    ranks(1).run(run, flags_of(whole, warm, *MORE), timeout=120)
    words, log = flags_of(killed, warm, *MORE), tmp_path / "log"
    draw = random.Random(5)
    job = start(words, log)
    for _ in range(int(PATIENCE_SECONDS / POLL_SECONDS)):
        if lines_of(killed / "metrics.jsonl") >= KILLED_AFTER or has_ended(job, POLL_SECONDS):
            break
    assert not has_ended(job, draw.uniform(0, 0.3)), log.read_text()[-4000:]
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    assert start(words, log).wait(PATIENCE_SECONDS) == 0, log.read_text()[-4000:]
    pair = [folder_of(folder / "saved", LAST) for folder in (whole, killed)]
    assert ranks(1).run(checkpoint_jobs.differences, *pair) == [[]]
    assert metrics_of(killed) == metrics_of(whole)
    for name in ("rollouts.jsonl", "evaluations.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
