"""What every recipient of metrics can do: take the metrics of a step, and end with an outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Number = int | float


class RunStopped(Exception):
    """A run ends before its last step because it was told to, and can be continued."""

    def __init__(self, reason: str, *, exit_code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the run stands."""

    status: Literal["running", "finished", "stopped", "failed"]
    reason: str = ""
    """One line: why it was stopped or failed; empty otherwise."""
    details: str = ""
    """The traceback of a failure; empty otherwise."""
    gaps: Sequence[str] = ()
    """What the record lacks, a sentence each."""


class Sink(Protocol):
    """A recipient of metrics; errors are the caller's to judge."""

    place: str
    """Where the metrics go, for messages."""

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Take the metrics of one finished step (steps increase strictly)."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Write out what is pending; nothing follows."""
        ...
