"""What a verifier is: a function of a response and the known answer, which no response makes raise.

Invariant: whatever a policy writes ends in a verdict, in bounded time; a reward that could not be
worked out is 0 and says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

VerifierName = Literal["exact", "numeric", "math"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a response earned."""

    reward: float
    """0 to 1."""
    answer: str | None = None
    """The part of the response that was compared; None = the response holds no answer."""
    error: str | None = None
    """Why the comparison was given up (time, memory, a crash); None = it was not."""


class Verifier(Protocol):
    """Compares a response with the known answer."""

    def __call__(self, response: str, *, answer: str) -> Verdict:
        """What the response earned; raises only for an `answer` that is no answer."""
        ...
