"""How a run that is told to end leaves a step before its first update.

A step depends on weights, seed and place only, so one whose weights have not changed is given up
and done again after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_ext.environments.base import TokenGenerator
from megatron_ext.rollout.types import Completion, Request


class StepDropped(Exception):
    """A step, or an evaluation, was given up on every rank; weights and optimizer are as before."""


class Stop(Protocol):
    """Whether the run is to end."""

    def is_asked(self) -> bool:
        """Whether some rank was told so, as far as this one knows; cheap, any rank may ask."""
        ...

    def is_agreed(self) -> bool:
        """The same, with one answer for all ranks.  Collective."""
        ...


class NeverStops:
    """A run that goes to its end."""

    def is_asked(self) -> bool:
        """Never."""
        return False

    def is_agreed(self) -> bool:
        """Never."""
        return False


class StoppableGenerator:
    """A token generator that raises `StepDropped` between two steps once the run is to end."""

    def __init__(self, generator: TokenGenerator, stop: Stop) -> None:
        self._generator = generator
        self._stop = stop

    @property
    def vocab_size(self) -> int:
        """See `TokenGenerator`."""
        return self._generator.vocab_size

    def submit(self, request: Request, *, keep: bool = False) -> int:
        """See `TokenGenerator`."""
        return self._generator.submit(request, keep=keep)

    def extend(self, ticket: int, token_ids: Sequence[int], *, max_new_tokens: int) -> None:
        """See `TokenGenerator`."""
        self._generator.extend(ticket, token_ids, max_new_tokens=max_new_tokens)

    def release(self, ticket: int) -> None:
        """See `TokenGenerator`."""
        self._generator.release(ticket)

    def step(self) -> Sequence[Completion]:
        """See `TokenGenerator`."""
        if self._stop.is_asked():
            raise StepDropped
        return self._generator.step()
