"""Tiny jobs on forked ranks: a launcher stands for torchrun, and no rank pays for imports."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

import pretrain_rl
from megatron_ext.files import lock

Kind = Literal["sft", "rl"]
LAST_STEP = 6
PATIENCE_SECONDS = 60.0
GRACE_SECONDS = 5.0
"""How long the other ranks may go on after one has failed."""
_MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 160 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --seed 3 "
    "--make-vocab-size-divisible-by 8 --packing --no-report-html --progress-interval-seconds 0 "
    f"--attention-dropout 0 --train-iters {LAST_STEP} --lr 1e-3 --save saved --load saved "
    "--output-dir out"
)
_KINDS: dict[Kind, str] = {
    "sft": "--train-data arithmetic-demonstrations --global-batch-size 4 --hidden-dropout 0.1",
    "rl": "--tasks arithmetic --algorithm grpo --entropy-coefficient 0.05 --group-size 2 "
    "--global-batch-size 4 --rollout-max-new-tokens 12 --eval-every 3 --eval-count 4 "
    "--hidden-dropout 0",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is run; the same in the uninterrupted run and in each with a fault."""

    kind: Kind
    num_ranks: int
    save_interval: int

    def words(self, *more: str) -> list[str]:
        """The command line; its folders are relative to the run's."""
        words = shlex.split(f"{_MODEL} {_KINDS[self.kind]} --save-interval {self.save_interval}")
        return [*words, *more]


class Running:
    """A launcher and its ranks, working in one folder; all output goes to `log` there."""

    def __init__(self, job: Job, folder: Path, *more: str) -> None:
        """Start them."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._log_start = self._log_size()
        read_end, write_end = os.pipe()
        self.launcher = forked(lambda: _launch(job, folder, job.words(*more), write_end))
        os.close(write_end)
        with os.fdopen(read_end) as pids:
            self.ranks = [int(word) for word in pids.readline().split()]
        self.code: int | None = None

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int | None:
        """The launcher's exit code (minus a signal), None if it goes on after that time."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.launcher, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                return None
            else:
                time.sleep(0.005)
        return self.code

    def ranks_end(self, seconds: float = GRACE_SECONDS) -> bool:
        """Whether every rank ends within that time."""
        deadline = time.monotonic() + seconds
        while any(map(is_alive, self.ranks)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def end(self) -> None:
        """Kill whatever is left of it."""
        for pid in (*self.ranks, self.launcher):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def said(self) -> str:
        """What this run has written to the log."""
        with (self.folder / "log").open(errors="replace") as file:
            file.seek(self._log_start)
            return file.read()

    def _log_size(self) -> int:
        path = self.folder / "log"
        return path.stat().st_size if path.exists() else 0


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def forked(action: Callable[[], int]) -> int:
    """A child that does this and exits with its result; its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = action()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        if (error := sys.exception()) is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(code)


def _launch(job: Job, folder: Path, words: Sequence[str], tell: int) -> int:
    """As torchrun: pass signals on, and end all ranks when one has failed."""
    os.chdir(folder)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    os.close(write_end)
    logger = forked(lambda: _log(read_end))
    os.close(read_end)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        forked(lambda rank=rank: _rank(rank, job, words, port)) for rank in range(job.num_ranks)
    ]

    def forward(number: int, frame: object) -> None:
        for pid in ranks:
            if is_alive(pid):
                os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    os.write(tell, f"{' '.join(map(str, ranks))}\n".encode())
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        pid, status = os.wait()
        if pid == logger:
            continue
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0 and len(codes) < len(ranks):
            time.sleep(0.3)
            forward(signal.SIGTERM, None)
            deadline = time.monotonic() + GRACE_SECONDS
            while any(map(is_alive, ranks)) and time.monotonic() < deadline:
                time.sleep(0.02)
            forward(signal.SIGKILL, None)
    for standard in (1, 2):
        os.close(standard)
    os.waitpid(logger, 0)
    return next((abs(code) for code in codes.values() if code), 0)


def _log(read_end: int) -> int:
    """Write what the others say to `log`, in a process whose disk is never full."""
    for standard in (1, 2):
        os.close(standard)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open("log", "ab", buffering=0) as log:
        while part := os.read(read_end, 65536):
            log.write(part)
    return 0


def _rank(rank: int, job: Job, words: Sequence[str], port: int) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    lock.PATIENCE_SECONDS = 0.3
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.num_ranks))
    os.environ.update(TORCHELASTIC_RUN_ID="soak", MASTER_ADDR="localhost", MASTER_PORT="0")
    # documented, but torch does not declare it as exported
    store_type: Any = getattr(dist, "TCPStore")  # noqa: B009
    store = store_type("127.0.0.1", port, job.num_ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.num_ranks)
    sys.argv[1:] = list(words)
    return pretrain_rl.main_in_one_sentence()


def run_to_end(job: Job, folder: Path) -> Running:
    """Start or continue a run and wait for it."""
    running = Running(job, folder)
    running.wait()
    running.end()
    return running
