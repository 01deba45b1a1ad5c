"""E11: padding is never routed, and the auxiliary losses obey the loss law on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.marks import slow_except
from tests.ranks import RankPool
from tests.upstream.moe_jobs import (
    FLAGS,
    compare,
    losses_at_capacity,
    sent_to_experts,
    write_reference,
)

TOLERANCE = 1e-5
"""Of the largest entry: fp32 sums of a few hundred terms in another order."""
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "one process": (1, ""),
    "tp2 sp": (2, SP),
    "dp2": (2, ""),
    "tp2 sp recompute": (2, f"{SP} {RECOMPUTE}"),
    "tp2 sp ep2": (2, f"{SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
    "tp2 sp pp2": (4, f"{SP} --pipeline-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def right(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, and the router gradients of the written-out formulas."""
    folder = tmp_path_factory.mktemp("moe")
    ranks(1).run(write_reference, folder)
    return folder


@pytest.mark.parametrize("kind", slow_except({"aux_loss", "z"}, FLAGS))
@pytest.mark.parametrize("name", slow_except({"one process", "tp2 sp"}, LAYOUTS))
def test_e11_router_gradients_are_the_formulas(ranks, right, name, kind):
    size, flags = LAYOUTS[name]
    for found in ranks(size).run(compare, right, flags=flags, kind=kind):
        wrong = {way: error for way, error in found.items() if not error < TOLERANCE}
        assert not wrong, f"{len(found)} ways: {wrong}"


def test_e11_no_padding_is_sent_to_an_expert(ranks):
    [found] = ranks(1).run(sent_to_experts)
    assert all(sent == real for sent, real in found), found


def test_e11_padding_takes_no_capacity(ranks):
    [losses] = ranks(1).run(losses_at_capacity)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)  # fp32, other orders of sums
