"""Runs a function on n real gloo ranks, for tests, at the cost of n forks.

    def total(value):                                  # at module level: it is pickled by reference
        x = torch.tensor(value * (dist.get_rank() + 1))
        dist.all_reduce(x)
        return x

    def test_total(ranks):
        assert ranks(2).run(total, 1.0) == [3.0, 3.0]  # the results, in rank order

The fixture `ranks` (conftest.py) is the one `RankPool` of the session.  Whatever a rank does
-- raise, die, hang -- ends in `RanksFailed` within the time limit, and the next job starts clean.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.rank_process import Job
from tests.rank_report import RanksFailed, explain, read_output
from tests.zygote import Exit, Ready

PRELOAD = (
    "pytest",
    "hypothesis",
    "megatron.core",
    "megatron.core.models.gpt",
    "megatron.training",
    "megatron_ext.upstream.*",
    "megatron.core.models.mimo",
    "megatron_ext.upstream.arguments:build_parser",
)
"""What every rank has imported before it starts; `package.*` = all modules of the package,
`module:function` = what the function caches."""
MAX_RANKS = 8
STARTUP_SECONDS = 300.0
"""For the zygote's imports: 6 s warm, more than a minute from a cold disk."""
ANSWER_SECONDS = 15.0
"""What the zygote may take beyond a job's time limit before it counts as hung itself."""
QUIET_OUTPUT = 2000
"""Characters of a successful rank's output that are still worth showing."""
ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of the zygote and all ranks: no GPU, no network, no thread before a fork."""


class Zygote:
    """The preloaded process, its folder and the connection to it."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        """Start it; returns at once, while it imports."""
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.num_jobs = 0
        self._is_in_job = False
        self._ready: Ready | None = None
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        command = "import sys; from tests.zygote import main; main(int(sys.argv[1]), sys.argv[2])"
        with theirs, (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", command, str(theirs.fileno()), str(self.folder)],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C ends pytest, and that closes the connection
            )
        self._connection.send(preload)

    @property
    def is_usable(self) -> bool:
        """Whether it runs and is not in the middle of a job that pytest abandoned."""
        return self.process.poll() is None and not self._is_in_job

    def ready(self) -> Ready:
        """What it says about its imports, once they are done."""
        ready = self._ready or self._answer(STARTUP_SECONDS, doing="importing")
        self._ready = ready
        return ready

    def submit(self, job: Job) -> list[Exit]:
        """Run a job and return how its ranks ended."""
        self.ready()
        self._is_in_job = True
        try:
            self._connection.send(job)
        except OSError as error:
            raise RanksFailed(self._death("waiting for a job")) from error
        exits = self._answer(job.timeout + ANSWER_SECONDS, doing="running a job")
        self._is_in_job = False
        return exits

    def _answer(self, seconds: float, *, doing: str) -> Any:
        if not self._connection.poll(seconds):
            self.close()
            raise RanksFailed(f"The zygote was killed: no answer for {seconds:.0f} s, {doing}.")
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise RanksFailed(self._death(doing)) from error

    def _death(self, doing: str) -> str:
        code = self.process.wait(ANSWER_SECONDS)
        log = (self.folder / "log").read_text(errors="replace")[-4000:]
        return f"The zygote died while {doing}, with exit code {code}.  Its output:\n{log}"

    def close(self) -> None:
        """End it, and with it every rank, and remove its files."""
        self._connection.close()
        try:
            self.process.wait(5.0 if self._ready else 0.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class RankPool:
    """`pool(n).run(...)`; owns a zygote, and replaces one that died or was left in a job."""

    def __init__(self, preload: tuple[str, ...] = PRELOAD) -> None:
        self.preload = preload
        self.zygote: Zygote | None = None

    def __call__(self, size: int) -> Ranks:
        """`size` ranks of this pool, 1 to 8."""
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(f"ranks({size}): a job can have 1 to {MAX_RANKS} ranks.")
        return Ranks(pool=self, size=size)

    def start(self) -> Zygote:
        """The zygote of the next job, just started if need be, and perhaps still importing."""
        if self.zygote is None or not self.zygote.is_usable:
            self.close()
            self.zygote = Zygote(self.preload)
        return self.zygote

    def close(self) -> None:
        """End every process of the pool and remove its files; a later job starts it again."""
        if self.zygote is not None:
            self.zygote.close()
            self.zygote = None


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A number of ranks to run functions on."""

    pool: RankPool
    size: int

    def run(
        self, function: Callable, *args: object, timeout: float = 60.0, **kwargs: object
    ) -> list:
        """Call `function(*args, **kwargs)` on every rank; return what each returned, in rank order.

        function: of a module's top level.  Arguments and results are pickled, tensors by value.
        timeout: seconds, imports of the zygote not counted; collectives give up after 80 % of it.
        In the function, torch.distributed is initialised (gloo); RANK, LOCAL_RANK, WORLD_SIZE are
        set; torch has one thread and a fixed seed; CUDA is hidden; output is shown by pytest.
        Raises RanksFailed, with each rank's traceback, exit code or stack and its last output.
        """
        __tracebackhide__ = True
        call = pickle.dumps((function, args, kwargs))
        zygote = self.pool.start()
        zygote.num_jobs += 1
        folder = zygote.folder / f"job-{zygote.num_jobs}"
        folder.mkdir()
        job = Job(call=call, size=self.size, timeout=timeout, folder=folder, sys_path=sys.path)
        exits = zygote.submit(job)
        failure = explain(job, exits, ready=zygote.ready())
        results = [] if failure else load_results(job)
        shutil.rmtree(folder)
        if failure:
            raise RanksFailed(failure)
        return results


def load_results(job: Job) -> list:
    """The results of a successful job, and its output, when small, to pytest's captured output."""
    import torch

    for rank in range(job.size):
        output = read_output(job.folder, rank)
        if 0 < len(output) <= QUIET_OUTPUT:
            print(f"--- output of rank {rank}\n{output}")
    files = [job.folder / f"{rank}.result" for rank in range(job.size)]
    return [torch.load(file, weights_only=False) for file in files]
