"""A process that compares mathematical answers for another one: requests in, verdicts out.

It imports sympy once and forks a child that does the work; a child that takes too much CPU time,
clock time or memory, or crashes, costs its answer, and the next child is forked in milliseconds.
Lines of JSON: {"answer", "gold"} on stdin; {"equal"} or {"error"} on stdout, after a first
{"ready"}.  It ends when stdin does.
Run as `python -m megatron_ext.rewards.math_worker CPU_SECONDS CLOCK_SECONDS MEMORY_MIB`.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.rewards.math_equality import are_equal

ANSWERS_PER_CHILD = 1000
WARM_UP = (r"\frac{1}{1+\sqrt{2}}", r"\sqrt{2}-1"), (r"\{2,1\}", r"(1,2)"), ("x^2+1", "5.5")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one answer may take."""

    cpu_seconds: float
    clock_seconds: float
    """Within which even a child that waits, or gets little of the CPU, is ended."""
    memory_mib: int


class Child:
    """A forked process that compares answers until it is told to end, or does not come back."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._is_late = False
        self.num_answers = 0
        request_out, request_in = os.pipe()
        reply_out, reply_in = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(request_in)
            os.close(reply_out)
            _work(request_out, reply_in, limits)
        os.close(request_out)
        os.close(reply_in)
        self._requests, self._replies = request_in, reply_out

    def compare(self, request: bytes) -> bytes | None:
        """The child's reply, a line; None = it went over a limit or died, and must be ended."""
        self.num_answers += 1
        self._is_late = False
        os.write(self._requests, request)
        reply = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                if not selector.select(timeout=self._limits.clock_seconds):
                    self._is_late = True
                    return None
                part = os.read(self._replies, 4096)
                if not part:
                    return None
                reply += part
        return reply

    def end(self) -> str:
        """End the process; what it died of, or was ended for."""
        os.kill(self._pid, signal.SIGKILL)  # a zombie until it is waited for, so the id is its own
        os.close(self._requests)
        os.close(self._replies)
        _, status = os.waitpid(self._pid, 0)
        if self._is_late:
            return f"took over {self._limits.clock_seconds:g} seconds"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            return f"took over {self._limits.cpu_seconds:g} CPU seconds"
        return f"crashed ({os.waitstatus_to_exitcode(status)})"


def _work(requests: int, replies: int, limits: Limits) -> None:
    """The child: answer requests; never returns."""
    try:
        _shut_in(limits)
        with os.fdopen(requests, "rb") as lines:
            for line in lines:
                os.write(replies, json.dumps(_answer(line, limits)).encode() + b"\n")
    finally:
        os._exit(1)


def _shut_in(limits: Limits) -> None:
    """Let this process print nowhere, grow no further, and end when its timer does."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # sympy and antlr print
        os.dup2(null, standard)
    if sys.platform == "linux":
        _limit_growth(limits.memory_mib * 2**20)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _limit_growth(num_bytes: int) -> None:
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = in_use + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(line: bytes, limits: Limits) -> dict[str, bool | str]:
    request = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    try:
        return {"equal": are_equal(request["answer"], gold=request["gold"])}
    except MemoryError:
        return {"error": f"took over {limits.memory_mib} MiB"}
    except RecursionError:
        return {"error": "went too deep"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def serve(limits: Limits) -> None:
    """Answer the requests on stdin until it is closed."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as replies:
        os.dup2(2, 1)  # what libraries print goes elsewhere
        for answer, gold in WARM_UP:
            are_equal(answer, gold=gold)
        replies.write(b'{"ready": true}\n')
        child: Child | None = None
        for line in sys.stdin.buffer:
            child = child or Child(limits)
            reply = child.compare(line)
            if reply is None:
                reply = json.dumps({"error": child.end()}).encode() + b"\n"
                child = None
            elif child.num_answers >= ANSWERS_PER_CHILD:
                child.end()
                child = None
            replies.write(reply)
        if child is not None:
            child.end()


if __name__ == "__main__":
    cpu_seconds, clock_seconds, memory_mib = sys.argv[1:]
    serve(
        Limits(
            cpu_seconds=float(cpu_seconds),
            clock_seconds=float(clock_seconds),
            memory_mib=int(memory_mib),
        )
    )
    os._exit(0)  # tidying up sympy takes longer than an answer
