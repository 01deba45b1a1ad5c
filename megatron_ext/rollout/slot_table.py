"""Which sequence holds which slot of the cache, and how large the cache is.

All slots have one capacity, which grows with the longest sequence; the more it grows, the fewer
slots a limited cache has.  Sequences that must give way lose their cache, not their tokens.
Running sequences are kept in the first slots, so that a step covers few others.
Invariant the tests check: slots x capacity never exceeds the limit, and the copies asked for leave
every sequence with its own cache.
"""

from __future__ import annotations

from megatron_ext.rollout.sequence import Sequence
from megatron_ext.rollout.step_plan import Copy

_STEP = 64
"""Capacities are a multiple of this."""


class SlotTable:
    """Slots, their owners and the capacity of the cache."""

    def __init__(self, *, max_slots: int, max_context: int, max_positions: int) -> None:
        """An empty table.

        max_positions: slots x capacity at most; 0 = no limit.
        """
        if 0 < max_positions < max_context:
            raise ValueError(
                f"--rollout-cache-tokens {max_positions} is less than the context of {max_context} "
                f"tokens: a sequence might not fit. Use at least {max_context}, or 0 for no limit."
            )
        self.max_slots, self.max_context = max_slots, max_context
        self.max_positions = max_positions
        self.capacity = 0
        self.owners: list[Sequence | None] = []

    @property
    def num_slots(self) -> int:
        """Slots that the cache has."""
        return len(self.owners)

    def occupants(self) -> list[Sequence]:
        """Sequences with a slot, in slot order."""
        return [owner for owner in self.owners if owner is not None]

    def slots_at(self, capacity: int) -> int:
        """Slots that the cache may have at some capacity."""
        if not self.max_positions:
            return self.max_slots
        return max(1, min(self.max_slots, self.max_positions // capacity))

    def capacity_for(self, length: int) -> int:
        """Capacity to choose for sequences of this length: some room to grow, rarely to resize."""
        return max(self._roomy(length), self.capacity)

    def _roomy(self, length: int) -> int:
        return min(-(-(length + length // 4 + 1) // _STEP) * _STEP, self.max_context)

    def release(self, sequence: Sequence) -> None:
        """Take its slot away; its cache is lost."""
        if sequence.slot >= 0:
            self.owners[sequence.slot] = None
        sequence.forget_cache()

    def make_room(self, length: int) -> tuple[list[Sequence], list[Copy]]:
        """Raise the capacity to at least `length`; who lost its slot, and copies to make.

        Sequences that wait to be continued go first, then the youngest running ones.
        """
        if length <= self.capacity:
            return [], []
        self.capacity = self.capacity_for(length)
        allowed = self.slots_at(self.capacity)
        occupants = sorted(self.occupants(), key=lambda s: (not s.is_running, s.ticket))
        evicted = occupants[allowed:]
        for sequence in evicted:
            self.release(sequence)
        copies = self._move_below(min(allowed, self.num_slots))
        del self.owners[allowed:]
        return evicted, copies

    def give_up_capacity(self) -> None:
        """Lower the capacity to what is used, if that gives more slots and is worth a resize."""
        if self.slots_at(max(self.capacity, 1)) < self.max_slots:
            longest = max((len(s.context) for s in self.occupants()), default=1)
            roomy = self._roomy(longest)
            if 2 * roomy <= self.capacity:
                self.capacity = roomy

    def make_slots(self, wanted: int) -> None:
        """Have room for so many sequences, if the cache may have it."""
        if wanted > self.num_slots:
            count = min(self.slots_at(self.capacity), 1 << (wanted - 1).bit_length())
            self.owners += [None] * (count - self.num_slots)

    def free_slot(self) -> int | None:
        """The first slot without an owner."""
        return self.owners.index(None) if None in self.owners else None

    def give(self, sequence: Sequence, slot: int) -> None:
        """Let a sequence have a free slot."""
        assert self.owners[slot] is None, f"slot {slot} has an owner"
        self.owners[slot] = sequence
        sequence.slot = slot

    def close_gaps(self) -> list[Copy]:
        """Move the last running sequences into free slots, if steps cover many slots in vain."""
        running = [s.slot for s in self.occupants() if s.is_running]
        if not running or running[-1] + 1 - len(running) <= max(1, len(running) // 4):
            return []
        return self._move_below(len(running))

    def _move_below(self, border: int) -> list[Copy]:
        """Move owners of slots from `border` on to free slots below it, as far as there are any."""
        free = [slot for slot, owner in enumerate(self.owners[:border]) if owner is None]
        movers = [s for s in self.owners[border:] if s is not None and s.is_running]
        movers += [s for s in self.owners[border:] if s is not None and not s.is_running]
        copies = []
        for slot, sequence in zip(free, movers, strict=False):
            copies.append(Copy(sequence.slot, slot, sequence.cached))
            self.owners[sequence.slot] = None
            sequence.slot = -1
            self.give(sequence, slot)
        return copies
