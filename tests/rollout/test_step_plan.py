"""Plans travel as integers; caches grow, shrink and copy without losing what is kept."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.rollout.cache import CacheField, SlotCache
from megatron_ext.rollout.sequence import common_length
from megatron_ext.rollout.step_plan import Copy, Piece, StepPlan

numbers = st.lists(st.integers(0, 2**40), max_size=5)
triples = st.lists(st.tuples(*[st.integers(0, 99)] * 3), max_size=3)


@given(numbers, numbers, numbers, triples, triples, triples, st.integers(0, 9))
def test_a_plan_survives_its_integers(tokens, slots, wanted, pieces, copies, later, extra):
    plan = StepPlan(
        tokens=tokens,
        slots=slots,
        positions=tokens,
        num_running=len(tokens),
        pieces=[Piece(*p) for p in pieces],
        wanted=wanted,
        num_slots=3,
        capacity=64,
        copies=[Copy(*c) for c in copies],
        later_copies=[Copy(*c) for c in later],
    )
    integers = plan.to_integers()
    assert integers[0] == len(integers) - 1
    assert StepPlan.from_integers([*integers, *range(extra)]) == plan


def test_resizing_and_copying_keep_what_is_kept():
    fields = [CacheField("key", 2, 3), CacheField("latent", 1, 5)]
    cache = SlotCache(fields, num_layers=2, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.bytes_per_position == 2 * 4 * (2 * 3 + 5)
    cache.resize(3, 4)
    for layer in range(2):
        for values in cache.layer(layer):
            values.copy_(torch.randn(values.shape))
    before = [[values.clone() for values in cache.layer(layer)] for layer in range(2)]
    cache.copy([Copy(2, 0, 3)])
    cache.resize(2, 8)
    cache.resize(5, 6)
    for layer in range(2):
        for now, then in zip(cache.layer(layer), before[layer], strict=True):
            assert torch.equal(now[0, :, :3], then[2, :, :3])
            assert torch.equal(now[1, :, :4], then[1])
            assert not now[2:].any() and not now[:, :, 4:].any()
    cache.drop()
    assert cache.num_slots == cache.capacity == 0


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_common_length(a, b):
    expected = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    assert common_length(a, b) == expected
