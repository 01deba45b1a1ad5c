"""The order in which a pipeline rank runs forwards and backwards, as data: 1F1B and interleaved
1F1B.

Megatron executes its own schedules; this is the same order (Narayanan et al. 2021, section 2.2),
for
planning, drawing and checking.
Invariant the tests check: equal to what Megatron's schedules execute, on every rank.

Legend: p pipeline ranks, v model chunks a rank, m microbatches, g microbatches a chunk runs in a
row.
"""

from __future__ import annotations

from typing import Literal

PipelineEvent = tuple[Literal["forward", "backward"], int, int]
"""(what, microbatch, model chunk of the rank)."""


def chunk_order(m: int, *, v: int, g: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in forward order: groups of g microbatches, through all chunks each."""
    order = []
    for start in range(0, m, g):
        group = range(start, min(start + g, m))
        order += [(microbatch, chunk) for chunk in range(v) for microbatch in group]
    return order


def num_warmup(*, p: int, rank: int, m: int, v: int = 1, g: int | None = None) -> int:
    """Forwards a rank runs before its first backward."""
    warmup = p - rank - 1 if v == 1 else (p - rank - 1) * 2 + (v - 1) * (g or p)
    return min(warmup, m * v)


def schedule(*, p: int, rank: int, m: int, v: int = 1, g: int | None = None) -> list[PipelineEvent]:
    """Everything rank ``rank`` of p runs in a step of m microbatches, in order.

    v = 1 is 1F1B.  g defaults to p, as in Megatron.

    Raises:
        ValueError: the interleaved schedule cannot run m microbatches in groups of g.
    """
    g = g or p
    if v > 1 and p > 1 and m % g and m % g < p:
        raise ValueError(
            f"{m} microbatches in groups of {g} leave {m % g} for the last group, less than the "
            f"{p} pipeline ranks: use a multiple of {g}."
        )
    forwards = chunk_order(m, v=v, g=g if v > 1 else m)
    backwards = [(microbatch, v - 1 - chunk) for microbatch, chunk in forwards]
    warmup = num_warmup(p=p, rank=rank, m=m, v=v, g=g) if p > 1 else 0
    events: list[PipelineEvent] = [("forward", *pair) for pair in forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        events += [("forward", *forward), ("backward", *backward)]
    return events + [("backward", *pair) for pair in backwards[len(forwards) - warmup :]]
