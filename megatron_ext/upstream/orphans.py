"""Ranks whose torchrun was killed end by themselves: nobody else would end them.

A thread looks at the parent's process id every second; it runs while the rank waits in a collective
or computes, because these release Python's lock.  Linux's death signal is not used: it comes
without a word, and when the thread that started the rank ends, not the process.
Not covered: a launcher that dies before the rank has imported this (joining the job fails then),
and scripts between torchrun and the rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

POLL_SECONDS = 1.0


@contextmanager
def tied_to_launcher() -> Iterator[None]:
    """End this process if torchrun started it and ends before the block does."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    is_over = threading.Event()
    threading.Thread(target=_watch, args=(os.getppid(), is_over), daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _watch(launcher: int, is_over: threading.Event) -> None:
    while not is_over.wait(POLL_SECONDS):
        if os.getppid() != launcher:
            rank = os.environ.get("RANK", "?")
            text = f"rank {rank}: torchrun (process {launcher}) is gone, so this rank ends\n"
            os.write(2, text.encode())
            os._exit(1)
