"""The schedule as data: laws of a pipeline schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.parallel.schedule import schedule

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))


@given(SIZES)
def test_everything_runs_once_and_forward_comes_first(sizes: tuple[int, int, int]) -> None:
    p, v, groups = sizes
    v = v if p > 1 else 1
    m = groups * p
    for rank in range(p):
        events = schedule(p=p, rank=rank, m=m, v=v)
        assert len(events) == len(set(events)) == 2 * m * v
        for microbatch in range(m):
            for chunk in range(v):
                forward = events.index(("forward", microbatch, chunk))
                assert forward < events.index(("backward", microbatch, chunk))


@given(SIZES)
def test_stages_can_run_it_without_deadlock(sizes: tuple[int, int, int]) -> None:
    """Each event's input comes from an event that is already over, in some order of all ranks."""
    p, v, groups = sizes
    v = v if p > 1 else 1
    m = groups * p
    queues = [schedule(p=p, rank=rank, m=m, v=v) for rank in range(p)]
    done: set[tuple[str, int, int]] = set()  # (what, microbatch, global stage)

    def is_ready(rank: int) -> bool:
        what, microbatch, chunk = queues[rank][0]
        stage = chunk * p + rank
        if what == "forward":
            return stage == 0 or ("forward", microbatch, stage - 1) in done
        last = stage == p * v - 1
        needed = ("forward", microbatch, stage) if last else ("backward", microbatch, stage + 1)
        return needed in done

    while any(queues):
        ready = [rank for rank in range(p) if queues[rank] and is_ready(rank)]
        assert ready, "deadlock"
        for rank in ready:
            what, microbatch, chunk = queues[rank].pop(0)
            done.add((what, microbatch, chunk * p + rank))


def test_illegal_number_of_microbatches_is_refused() -> None:
    with pytest.raises(ValueError, match="5 microbatches in groups of 4 leave 1"):
        schedule(p=4, rank=0, m=5, v=2)
