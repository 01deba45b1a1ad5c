"""Which tokens the next step computes: continuous batching with shared prefill.

Every sequence is tokens of which the first `cached` lie in its slot; a step computes some of the
others.  A running sequence has one, a new prompt many (computed in pieces), an interrupted one all.
So decoding, prefill, continuing a conversation and recovering from lost cache are one thing.
Invariants the tests check: no sequence is starved; a sequence's tokens do not depend on the others.
"""

from __future__ import annotations

from collections import deque

from megatron_ext.rollout.sequence import Sequence, common_length
from megatron_ext.rollout.slot_table import SlotTable
from megatron_ext.rollout.step_plan import Copy, Piece, StepPlan

_LEAST_SHARED = 8
"""Prompts that begin alike share this many tokens, or all but one of a shorter prompt."""


class Scheduler:
    """Queue and slots of one model replica."""

    def __init__(self, table: SlotTable, *, prefill_tokens: int, share_prefill: bool) -> None:
        self.table = table
        self.prefill_tokens = prefill_tokens
        self.share_prefill = share_prefill
        self.waiting: deque[Sequence] = deque()
        self.positions_shared = 0
        """Positions copied from another sequence's cache instead of computed."""
        self._fed: list[tuple[Sequence, int]] = []
        self._later: list[tuple[Sequence, Copy]] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence wants tokens."""
        return bool(self.waiting) or any(s.is_running for s in self.table.occupants())

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others, or, if it was started before, in front."""
        if sequence.slot >= 0:
            return
        if sequence.logprobs or len(sequence.context) > len(sequence.request.prompt_ids):
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def stop(self, sequence: Sequence) -> None:
        """A sequence does not run any more; a kept one keeps its slot while nobody needs it."""
        if sequence.slot < 0 and sequence in self.waiting:
            self.waiting.remove(sequence)
        if not sequence.is_kept:
            self.table.release(sequence)

    def drop_caches(self) -> None:
        """Nothing is cached any more; what was running is in front of the queue, oldest first."""
        occupants = self.table.occupants()
        for sequence in occupants:
            self.table.release(sequence)
        running = sorted((s for s in occupants if s.is_running), key=lambda s: s.ticket)
        self.waiting.extendleft(reversed(running))
        self.table.owners, self.table.capacity = [], 0

    def plan(self) -> tuple[StepPlan, list[tuple[Sequence, int]]]:
        """The next step, and which sequence draws from which of its wanted logits.

        Call `finish` once it is carried out.  There must be work.
        """
        copies = self._settle()
        copies += self._admit()
        copies += self._follow()
        tokens, slots, positions, draws = [], [], [], []
        pieces: list[Sequence] = []
        self._fed, self._later = [], []
        for sequence in self.table.owners:
            if sequence is None or not sequence.is_running or sequence.leader is not None:
                continue
            if len(sequence.context) - sequence.cached > 1:
                pieces.append(sequence)
                continue
            draws.append((sequence, len(draws)))
            tokens.append(sequence.context[-1])
            slots.append(sequence.slot)
            positions.append(sequence.cached)
            self._fed.append((sequence, 1))
        plan = StepPlan(
            tokens=tokens,
            slots=slots,
            positions=positions,
            num_running=len(tokens),
            wanted=list(range(len(tokens))),
            num_slots=self.table.num_slots,
            capacity=self.table.capacity,
            copies=copies,
        )
        if pieces:
            self._add_pieces(plan, pieces, draws)
        return plan, draws

    def finish(self) -> None:
        """The planned step was carried out: its tokens are in the cache."""
        for sequence, count in self._fed:
            sequence.cached += count
        for sequence, copy in self._later:
            sequence.cached, sequence.leader = copy.length, None

    def _settle(self) -> list[Copy]:
        """Make the running sequences fit, and lie close together."""
        longest = max((len(s.context) for s in self.table.occupants() if s.is_running), default=0)
        evicted, copies = self.table.make_room(longest)
        evicted.sort(key=lambda s: s.ticket)
        self.waiting.extendleft(s for s in reversed(evicted) if s.is_running)
        if self.waiting:
            self.table.give_up_capacity()
            return copies
        return copies + self.table.close_gaps()

    def _admit(self) -> list[Copy]:
        """Give slots to waiting sequences as long as there are any."""
        table = self.table
        copies: list[Copy] = []
        while self.waiting:
            sequence = self.waiting[0]
            num_running = sum(s.is_running for s in table.occupants())
            needed = table.capacity_for(len(sequence.context))
            if 0 < table.slots_at(needed) <= num_running:
                break
            copies += table.make_room(len(sequence.context))[1]
            table.make_slots(len(table.occupants()) + len(self.waiting))
            donor, shared = self._donor(sequence)
            source = -1 if donor is None else donor.slot
            slot = table.free_slot()
            if slot is None:
                slot = self._evict_parked(donor)
            self.waiting.popleft()
            table.give(sequence, slot)
            if donor is not None:
                sequence.cached = shared
                self.positions_shared += shared
                copies += [Copy(source, slot, shared)] if source != slot else []
            self._find_leader(sequence)
        return copies

    def _evict_parked(self, donor: Sequence | None) -> int:
        """Free the slot of a sequence that does not run, best of one whose cache is of use."""
        parked = [s for s in self.table.occupants() if not s.is_running]
        victim = donor if donor in parked else min(parked, key=lambda s: s.ticket)
        assert victim is not None, "fewer run than there are slots, and all slots have owners"
        slot = victim.slot
        self.table.release(victim)
        return slot

    def _donor(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The sequence with the longest beginning in common that is cached, and how long it is.

        At least the last token is left to compute.
        """
        found, shared = None, self._least_shared(sequence) - 1
        most = len(sequence.context) - 1
        for other in self.table.occupants() if self.share_prefill else []:
            if min(other.cached, most) > shared:
                length = self._in_common(sequence, other, min(other.cached, most))
                if length > shared:
                    found, shared = other, length
        return found, shared

    def _find_leader(self, sequence: Sequence) -> None:
        """Wait for another sequence's prompt if it begins alike further than what is cached."""
        best = max(sequence.cached, self._least_shared(sequence) - 1)
        for other in self.table.occupants() if self.share_prefill else []:
            if other.pending <= 1 or other is sequence or not other.is_running or other.leader:
                continue
            length = self._in_common(sequence, other, len(sequence.context))
            if length > max(best, other.cached):
                sequence.leader, best = (other, length), length

    @staticmethod
    def _least_shared(sequence: Sequence) -> int:
        return min(_LEAST_SHARED, max(1, len(sequence.context) - 1))

    def _in_common(self, sequence: Sequence, other: Sequence, limit: int) -> int:
        """Length of the common beginning up to `limit`; 0 if it is too short to share."""
        a, b, least = sequence.context, other.context, self._least_shared(sequence)
        if limit < least or a[:least] != b[:least]:
            return 0
        return common_length(a[:limit], b[:limit])

    def _follow(self) -> list[Copy]:
        """Copy from leaders that got far enough; forget those that were lost."""
        copies = []
        for sequence in self.table.occupants():
            if sequence.leader is None:
                continue
            leader, length = sequence.leader
            if leader.slot < 0 or not leader.is_running:
                sequence.leader = None
            elif leader.cached >= length:
                shared = min(length, len(sequence.context) - 1)
                copies.append(Copy(leader.slot, sequence.slot, shared))
                self.positions_shared += shared - sequence.cached
                sequence.cached, sequence.leader = shared, None
        return copies

    def _add_pieces(
        self, plan: StepPlan, pieces: list[Sequence], draws: list[tuple[Sequence, int]]
    ) -> None:
        """Add prompts, oldest first, up to the limit; who has the same prompt draws with it."""
        room = self.prefill_tokens
        for sequence in sorted(pieces, key=lambda s: s.ticket):
            count = min(sequence.pending, room)
            if count == 0:
                return
            room -= count
            start, end = sequence.cached, sequence.cached + count
            plan.pieces.append(Piece(sequence.slot, start, count))
            plan.tokens.extend(sequence.context[start:end])
            plan.slots.extend([sequence.slot] * count)
            plan.positions.extend(range(start, end))
            self._fed.append((sequence, count))
            if end < len(sequence.context):
                continue
            draws.append((sequence, len(plan.wanted)))
            for other in self.table.occupants():
                if other.leader == (sequence, end) and len(other.context) == end:
                    copy = Copy(sequence.slot, other.slot, end)
                    plan.later_copies.append(copy)
                    self._later.append((other, copy))
                    self.positions_shared += end - other.cached
                    draws.append((other, len(plan.wanted)))
            plan.wanted.append(len(plan.tokens) - 1)
