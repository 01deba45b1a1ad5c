"""What every recipient of metrics can do: take the metrics of a step, and end with an outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Number = int | float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the run stands."""

    status: Literal["running", "finished", "failed"]
    reason: str = ""
    """One line: why it failed; empty otherwise."""
    details: str = ""
    """The traceback of a failure; empty otherwise."""


class Sink(Protocol):
    """A recipient of metrics; errors are the caller's to judge."""

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Take the metrics of one finished step (steps increase strictly)."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Write out what is pending; nothing follows."""
        ...
