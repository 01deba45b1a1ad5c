"""The verifier of mathematical answers: comparisons run in other processes, each within limits.

Works from any thread; a forked copy of this process gets workers of its own.  Equal texts and
different integers are settled here; the rest goes to `math_worker.py`.
Invariant: every answer, also `9^{9^{9^9}}`, ends in a verdict within the limits.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

from megatron_ext.rewards.base import Verdict
from megatron_ext.rewards.config import RewardConfig
from megatron_ext.rewards.final_answer import MAX_ANSWER_LENGTH, final_answer, unwrapped
from megatron_ext.rewards.formula.nodes import BrokenFormula, UnknownFormula
from megatron_ext.rewards.formula.reading import read

START_SECONDS = 120
"""Within which a worker must have imported sympy."""
CLOCK_SECONDS_PER_CPU_SECOND = 4
"""Seconds on the clock that an answer may take for each CPU second it may take."""
GRACE_SECONDS = 10
"""That a worker may take, over the limits of the answer, to report that it ended it."""
LEAVE_SECONDS = 2
"""That a worker has to end by itself."""

_INTEGER = re.compile(r"-?\d{1,15}")
_ROOT = Path(__file__).resolve().parents[2]


class MathVerifier:
    """Compares answers in `--math-workers` processes.  Use as a context manager, or `close()`."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[_Worker] | None = None
        self._workers: list[_Worker] = []
        self._owner = 0

    def __call__(self, response: str, *, answer: str) -> Verdict:
        """1 where the answer that the response states (see `final_answer`) equals `answer`.

        Raises:
            ValueError: `answer` is no answer; see `known_answer_problem`.
            RuntimeError: no worker can be started.
        """
        if (problem := known_answer_problem(answer)) is not None:
            raise ValueError(f"the answer {answer[:80]!r} {problem}")
        gold = unwrapped(answer)
        stated = final_answer(response)
        if stated is None:
            return Verdict(reward=0.0)
        settled = _settled_by_text(stated, gold)
        if settled is not None:
            return Verdict(reward=float(settled), answer=stated)
        idle = self._pool()
        worker = idle.get()
        try:
            reply = worker.ask({"answer": stated, "gold": gold})
        finally:
            idle.put(worker)
        error = reply.get("error")
        return Verdict(
            reward=float(reply.get("equal", False)),
            answer=stated,
            error=None if error is None else f"checking the answer {stated[:80]!r} {error}",
        )

    def close(self) -> None:
        """End the workers; the next answer starts new ones."""
        with self._lock:
            workers, self._workers, self._idle = self._workers, [], None
        if self._owner == os.getpid():
            for worker in workers:
                worker.end()

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pool(self) -> queue.SimpleQueue[_Worker]:
        with self._lock:
            if self._idle is None or self._owner != os.getpid():
                self._owner = os.getpid()
                self._workers = [_Worker(self._config) for _ in range(self._config.math_workers)]
                self._idle = queue.SimpleQueue()
                for worker in self._workers:
                    self._idle.put(worker)
            return self._idle


class _Worker:
    """One worker process; started at once, started anew when it dies."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._start()

    def ask(self, request: dict[str, str]) -> dict:
        """The worker's reply; {"error": reason} also where the worker itself was lost."""
        if not self._is_ready:
            self._await_start()
        seconds = CLOCK_SECONDS_PER_CPU_SECOND * self._config.math_time_limit + GRACE_SECONDS
        reply = self._exchange(json.dumps(request).encode() + b"\n", seconds)
        if reply is None:
            self.end()
            self._start()
            return {"error": "ended the process that did it"}
        return reply

    def end(self) -> None:
        """Kill the process and its child."""
        self._end()

    def _start(self) -> None:
        self._is_ready = False
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megatron_ext.rewards.math_worker",
                str(self._config.math_time_limit),
                str(CLOCK_SECONDS_PER_CPU_SECOND * self._config.math_time_limit),
                str(self._config.math_memory_limit),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": _python_path(), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the trainer; one signal ends the group
        )
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._requests, self._replies = process.stdin.fileno(), process.stdout.fileno()
        self._end = weakref.finalize(self, _kill, process, os.getpid())

    def _await_start(self) -> None:
        if self._exchange(b"", START_SECONDS) is None:
            self.end()
            raise RuntimeError(
                f"the process that checks mathematical answers did not start (exit status "
                f"{self._process.returncode}). See why with: "
                f"{sys.executable} -c 'import megatron_ext.rewards.math_equality' "
                "(it needs the packages math-verify and latex2sympy2-extended)."
            )
        self._is_ready = True

    def _exchange(self, line: bytes, seconds: float) -> dict | None:
        """Write a line, read one; None = the worker died or said nothing in time."""
        deadline = time.monotonic() + seconds
        reply = b""
        try:
            while line:
                line = line[os.write(self._requests, line) :]
            with selectors.DefaultSelector() as selector:
                selector.register(self._replies, selectors.EVENT_READ)
                while not reply.endswith(b"\n"):
                    if not selector.select(timeout=max(0.0, deadline - time.monotonic())):
                        return None
                    part = os.read(self._replies, 65536)
                    if not part:
                        return None
                    reply += part
        except BrokenPipeError:
            return None
        return json.loads(reply)


@functools.lru_cache(maxsize=4096)
def known_answer_problem(answer: str) -> str | None:
    """Why a text cannot be the known answer of a task for `math`; None = it can."""
    gold = unwrapped(answer)
    if not 0 < len(gold) <= MAX_ANSWER_LENGTH:
        return f"has {len(gold)} characters: the verifier math needs 1 to {MAX_ANSWER_LENGTH}."
    try:
        read(gold)
    except BrokenFormula as error:
        return f"cannot be read ({error}): write it as LaTeX, or use the verifier exact."
    except UnknownFormula:
        return None  # math-verify may know it; at least the same text is paid
    return None


def _settled_by_text(stated: str, gold: str) -> bool | None:
    """Whether the answers are equal, where their texts tell; None = they do not."""
    if stated == gold:
        return True
    if _INTEGER.fullmatch(stated) and _INTEGER.fullmatch(gold):
        return int(stated) == int(gold)
    return None


def _python_path() -> str:
    """PYTHONPATH with this package's root first."""
    return os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a worker and its child; a forked copy of the owner leaves them alone."""
    if os.getpid() != owner:
        return
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()  # it then ends its child and itself, unless it is busy
    try:
        process.wait(timeout=LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdout.close()
