"""Says why a distributed test failed: root causes first, then the ranks that suffered from them.

Order: ranks that raised or died by themselves, by time; ranks that had to be ended, with their
Python stack; ranks that only lost a peer; ranks that returned.
"""

from __future__ import annotations

import pickle
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rank_process import Job
from tests.zygote import Exit, Ready

OUTPUT_TAIL = 4000
"""Characters of a rank's output that a failure shows."""
RAISED_OR_DIED, ENDED, LOST_PEER, RETURNED = range(4)
"""What became of a rank, in the order of the report."""

PORT = re.compile(r"\[[\d.]+\]:\d+")
"""Address in gloo's messages, the one thing that differs between ranks that lost the same peer."""


class RanksFailed(Exception):
    """A distributed function did not return on every rank; the message has each rank's story."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """What became of one rank."""

    rank: int
    kind: int
    """One of the four above."""
    at: float
    """time.monotonic() of the event."""
    headline: str
    body: str = ""
    """Traceback or stack."""


def explain(job: Job, exits: Sequence[Exit], *, ready: Ready) -> str:
    """The report of a failed job, empty if every rank returned.

    Modules that the zygote failed to import, and threads it should not have, follow as suspects.
    """
    stories = sorted((story(job.folder, end) for end in exits), key=lambda s: (s.kind, s.at))
    failed = [s for s in stories if s.kind != RETURNED]
    if not failed:
        return ""
    first = failed[0]
    parts = [f"{len(failed)} of {job.size} ranks failed; first rank {first.rank}: {first.headline}"]
    told: dict[str, int] = {}
    for s in stories:
        parts.append(f"=== rank {s.rank}: {s.headline}")
        if s.body:
            teller = told.setdefault(PORT.sub("", s.body), s.rank)
            parts.append(s.body if teller == s.rank else f"as on rank {teller}")
        output = read_output(job.folder, s.rank)
        if output:
            cut = "... " if len(output) > OUTPUT_TAIL else ""
            parts.append(f"--- output of rank {s.rank}\n{cut}{output[-OUTPUT_TAIL:]}")
    parts += [
        f"=== not importable in advance: {name}\n{trace}" for name, trace in ready.skipped.items()
    ]
    if ready.num_threads > 1:
        parts.append(f"=== not safe to fork: imports left the zygote {ready.num_threads} threads")
    return "\n".join(part.rstrip("\n") for part in parts)


def story(folder: Path, end: Exit) -> Story:
    """What became of a rank, from how its process ended and the files it left."""
    error = folder / f"{end.rank}.error"
    if (folder / f"{end.rank}.result").exists():
        return Story(rank=end.rank, kind=RETURNED, at=end.at, headline="returned")
    if error.exists():
        at, is_peer_loss, trace = pickle.loads(error.read_bytes())
        kind = LOST_PEER if is_peer_loss else RAISED_OR_DIED
        last_line = trace.rstrip("\n").rpartition("\n")[2]
        headline = "lost a peer" if is_peer_loss else f"raised {last_line}"
        return Story(rank=end.rank, kind=kind, at=at, headline=headline, body=trace)
    if end.was_ended:
        stack = (folder / f"{end.rank}.stack").read_text(errors="replace")
        headline = "did not end by itself and was killed; it was here:"
        return Story(rank=end.rank, kind=ENDED, at=end.at, headline=headline, body=stack)
    how = (
        f"died of {signal.Signals(-end.code).name}"
        if end.code < 0
        else f"exited with code {end.code}"
    )
    return Story(
        rank=end.rank, kind=RAISED_OR_DIED, at=end.at, headline=f"{how} before it returned a result"
    )


def read_output(folder: Path, rank: int) -> str:
    """What a rank wrote to stdout and stderr."""
    path = folder / f"{rank}.output"
    return path.read_text(errors="replace") if path.exists() else ""
