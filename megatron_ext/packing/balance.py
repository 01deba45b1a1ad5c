"""Which data-parallel rank runs which microbatch: even work, the same legal count everywhere.

Idea: the fewest microbatches that a pipeline schedule accepts, then work spread evenly over ranks
and, inside a rank, over its microbatches; what stays empty is a zero-weight filler (`[]`).
Invariants the tests check: every sequence exactly once, equal legal counts, no row over capacity.
Not covered: the collective that agrees on a count when ranks hold different sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from torch import Tensor

from megatron_ext.packing.config import Overlong
from megatron_ext.packing.pack import CAPACITY_FLAG, fit_lengths, pack, token_budget_batches

Batches = list[list[int]]
"""Microbatches as sequence indices; an empty one is a filler."""

MAX_FULL_SLOTS_TRIED = 64
"""Microbatches without room that spreading looks at before it keeps the first-fit rows."""


def sequence_cost(length: int, *, attention_weight: float = 0.0) -> float:
    """Work of one sequence in units of one token's linear work: n + attention_weight * n^2."""
    return length + attention_weight * length * length


def legal_num_microbatches(
    minimum: int, *, pipeline_size: int = 1, group_size: int | None = None, whole: bool = True
) -> int:
    """Smallest legal number of microbatches a rank that is at least `minimum` (0 stays 0).

    group_size: microbatches a virtual stage runs at a time (interleaved schedule; Megatron's
    default is the pipeline size), None = not interleaved.  whole: full groups only; else the last
    group may also hold pipeline_size or more, as Megatron allows.
    """
    if group_size is None or minimum == 0:
        return minimum
    if group_size < pipeline_size:
        raise ValueError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group_size} is less than "
            f"--pipeline-model-parallel-size {pipeline_size}: use {pipeline_size} or more."
        )
    groups, rest = divmod(max(minimum, group_size), group_size)
    if rest == 0:
        return groups * group_size
    if whole:
        return (groups + 1) * group_size
    return groups * group_size + max(rest, pipeline_size)


def equalize(
    ranks: Sequence[Batches],
    *,
    minimum: int = 0,
    pipeline_size: int = 1,
    group_size: int | None = None,
    whole: bool = True,
) -> list[Batches]:
    """The same legal number of microbatches on every rank, missing ones as fillers.

    minimum: the largest number on any other rank, for a caller that holds only its own part.
    """
    most = max([minimum, *(len(batches) for batches in ranks)])
    count = legal_num_microbatches(
        most, pipeline_size=pipeline_size, group_size=group_size, whole=whole
    )
    return [[*batches, *([] for _ in range(count - len(batches)))] for batches in ranks]


def allocate(
    lengths: Sequence[int] | Tensor,
    *,
    max_tokens: int,
    data_parallel_size: int,
    packing: bool = True,
    attention_weight: float = 0.0,
    pipeline_size: int = 1,
    group_size: int | None = None,
    max_segments: int | None = None,
    overlong: Overlong = "error",
    flag: str = CAPACITY_FLAG,
) -> list[Batches]:
    """Microbatches of every data-parallel rank: [rank][microbatch] -> sequence indices.

    packing: a microbatch is one row of max_tokens; else padded rows of together max_tokens.
    Every rank gets the same legal number, the fewest that first-fit decreasing (or the padded
    budget) needs; costly microbatches come first, fillers last.  Deterministic, so every rank can
    compute the whole plan from the same lengths.
    """
    if data_parallel_size < 1:
        raise ValueError(f"data_parallel_size {data_parallel_size} is not a number of ranks.")
    fitted = fit_lengths(lengths, max_tokens, overlong=overlong, flag=flag).lengths
    kept = [i for i, n in enumerate(fitted) if n]
    if packing:
        rows = pack([fitted[i] for i in kept], max_tokens, max_segments=max_segments)
    else:
        rows = token_budget_batches([fitted[i] for i in kept], max_tokens)
    rows = [[kept[j] for j in row] for row in rows]
    count = legal_num_microbatches(
        -(-len(rows) // data_parallel_size), pipeline_size=pipeline_size, group_size=group_size
    )

    def cost(batch: Sequence[int]) -> float:
        if not packing:
            width = max((fitted[i] for i in batch), default=0)
            return len(batch) * sequence_cost(width, attention_weight=attention_weight)
        return sum(sequence_cost(fitted[i], attention_weight=attention_weight) for i in batch)

    ranks = None
    if packing:
        ranks = _spread_samples(
            kept,
            lengths=fitted,
            cost=cost,
            num_ranks=data_parallel_size,
            count=count,
            capacity=max_tokens,
            max_segments=max_segments,
        )
    if ranks is None:
        pieces = _split_costly(rows, wanted=data_parallel_size * count, cost=cost)
        ranks = _partition(pieces, num_parts=data_parallel_size, most=count, cost=cost)
    ordered = [sorted(batches, key=lambda batch: -cost(batch)) for batches in ranks]
    return [[*batches, *([] for _ in range(count - len(batches)))] for batches in ordered]


def _partition(
    items: Batches, *, num_parts: int, most: int, cost: Callable[[Sequence[int]], float]
) -> list[Batches]:
    """Costliest first, each to the least loaded part that holds fewer than `most`."""
    parts: list[Batches] = [[] for _ in range(num_parts)]
    heap = [(0.0, p) for p in range(num_parts)]
    for item in sorted(items, key=lambda item: -cost(item)):
        load, p = heap[0]
        parts[p].append(item)
        if len(parts[p]) < most:
            heapreplace(heap, (load + cost(item), p))
        else:
            heappop(heap)
    return parts


def _spread_samples(
    kept: list[int],
    *,
    lengths: list[int],
    cost: Callable[[Sequence[int]], float],
    num_ranks: int,
    count: int,
    capacity: int,
    max_segments: int | None,
) -> list[Batches] | None:
    """Sequences evenly over ranks, then over each rank's `count` rows; None if a rank overflows."""
    shares = _partition([[i] for i in kept], num_parts=num_ranks, most=len(kept), cost=cost)
    ranks: list[Batches] = []
    for share in shares:
        members = [i for [i] in share]
        rows = _spread_rows(
            members,
            lengths=lengths,
            cost=cost,
            count=count,
            capacity=capacity,
            max_segments=max_segments or len(kept),
        )
        if rows is None:
            own = pack([lengths[i] for i in members], capacity, max_segments=max_segments)
            if len(own) > count:
                return None
            rows = [[members[j] for j in row] for row in own]
            rows = _split_costly(rows, wanted=count, cost=cost)
        ranks.append(rows)
    return ranks


def _spread_rows(
    members: list[int],
    *,
    lengths: list[int],
    cost: Callable[[Sequence[int]], float],
    count: int,
    capacity: int,
    max_segments: int,
) -> Batches | None:
    """`members` (costliest first), each into the cheapest row with room; None if there is none."""
    rows: Batches = [[] for _ in range(count)]
    free = [capacity] * count
    heap = [(0.0, r) for r in range(count)]
    for i in members:
        full = []
        while heap and (free[heap[0][1]] < lengths[i] or len(rows[heap[0][1]]) >= max_segments):
            full.append(heappop(heap))
            if len(full) > MAX_FULL_SLOTS_TRIED:
                return None
        if not heap:
            return None
        load, r = heap[0]
        rows[r].append(i)
        free[r] -= lengths[i]
        heapreplace(heap, (load + cost([i]), r))
        for entry in full:
            heappush(heap, entry)
    return [row for row in rows if row]


def _split_costly(
    batches: Batches, *, wanted: int, cost: Callable[[Sequence[int]], float]
) -> Batches:
    """Halve the costliest microbatches until there are `wanted`: spare slots carry work.

    Members are longest first and each half keeps neighbours, so padded halves waste no more.
    """
    heap = [(-cost(batch), number, batch) for number, batch in enumerate(batches)]
    heapify(heap)
    single: Batches = []
    number = len(batches)
    while heap and len(heap) + len(single) < wanted:
        _, _, batch = heappop(heap)
        if len(batch) == 1:
            single.append(batch)
            continue
        half = len(batch) // 2
        for part in (batch[:half], batch[half:]):
            heappush(heap, (-cost(part), number, part))
            number += 1
    return [*single, *(batch for _, _, batch in heap)]
