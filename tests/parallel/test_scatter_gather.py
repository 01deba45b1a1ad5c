"""Scatter and gather are inverse, and each rank sends exactly 1/t."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_ext.parallel.scatter_gather import PipelineTraffic, empty_full, gather_into, scatter
from tests.ranks import RankPool


def round_trip(shape: tuple[int, int, int]) -> tuple[bool, int]:
    """Whether gather(scatter(x)) is x on this rank, and the bytes that would be sent."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    part = scatter(x, group=dist.group.WORLD)
    traffic = PipelineTraffic()
    traffic.add(part)
    traffic.add(None)
    full = empty_full(part, group=dist.group.WORLD)
    gather_into(full, part, group=dist.group.WORLD)
    return torch.equal(full.detach(), x), traffic.sent_bytes


@pytest.mark.parametrize("size", [2, 4])
def test_gather_of_scatter_is_identity(ranks: RankPool, size: int) -> None:
    shape = (5, 3, 8)
    for is_same, sent in ranks(size).run(round_trip, shape):
        assert is_same
        assert sent == 5 * 3 * 8 * 4 // size
