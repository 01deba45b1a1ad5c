"""What one decoding step computes: the engine decides, every rank of a replica carries it out.

A step is a row of tokens: first one for each running request, then pieces of prompts.  Each token
says which cache slot it belongs to and its position there.  A plan travels to the ranks that only
carry it out as one row of integers.
Invariant the tests check: a plan survives the way through its integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Piece(NamedTuple):
    """Consecutive tokens of one prompt."""

    slot: int
    start: int
    """Position of the first of them; what lies before is in the cache."""
    length: int


class Copy(NamedTuple):
    """The first `length` positions of one slot's cache, copied to another's."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Tokens of a step, in order, and what happens to the cache around it."""

    tokens: list[int]
    slots: list[int]
    """Slot of each token."""
    positions: list[int]
    """Place of each token in its sequence."""
    num_running: int
    """So many tokens, in slot order, are the only one of their slot; `pieces` are the rest."""
    pieces: list[Piece] = field(default_factory=list)
    wanted: list[int]
    """Tokens, by their place in the step, whose next-token logits are needed."""
    num_slots: int
    """Slots of the cache from this step on."""
    capacity: int
    """Positions of each slot from this step on."""
    copies: list[Copy] = field(default_factory=list)
    """Done before the step, in order."""
    later_copies: list[Copy] = field(default_factory=list)
    """Done after the step."""

    def to_integers(self) -> list[int]:
        """The plan as integers, their number first."""
        lists = [
            self.tokens,
            self.slots,
            self.positions,
            [number for piece in self.pieces for number in piece],
            self.wanted,
            [number for copy in self.copies for number in copy],
            [number for copy in self.later_copies for number in copy],
        ]
        body = [self.num_running, self.num_slots, self.capacity]
        for values in lists:
            body += [len(values), *values]
        return [len(body), *body]

    @classmethod
    def from_integers(cls, integers: Sequence[int]) -> StepPlan:
        """The plan whose integers these are; what follows them is ignored."""
        num_running, num_slots, capacity = integers[1:4]
        lists, place = [], 4
        for _ in range(7):
            count = integers[place]
            lists.append(list(integers[place + 1 : place + 1 + count]))
            place += 1 + count
        tokens, slots, positions, pieces, wanted, copies, later = lists
        return cls(
            tokens=tokens,
            slots=slots,
            positions=positions,
            num_running=num_running,
            pieces=[Piece(*numbers) for numbers in _by_three(pieces)],
            wanted=wanted,
            num_slots=num_slots,
            capacity=capacity,
            copies=[Copy(*numbers) for numbers in _by_three(copies)],
            later_copies=[Copy(*numbers) for numbers in _by_three(later)],
        )


def _by_three(values: list[int]) -> list[tuple[int, int, int]]:
    return list(zip(values[::3], values[1::3], values[2::3], strict=True))
