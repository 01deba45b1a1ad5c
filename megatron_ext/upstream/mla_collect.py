"""Calibration sums of all ranks on the writer, one layer at a time.

Those of data-parallel ranks are added and those of tensor-parallel ranks joined, both in order of
rank; then pipeline stages send theirs.  The writer holds what it has and one layer more.
Invariant the tests check: what is collected is what one rank would have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from megatron_ext.mla.statistics import LayerStatistics
from megatron_ext.upstream.layout import Layout

Combine = Callable[[LayerStatistics, LayerStatistics], LayerStatistics]


def collect(
    own: dict[int, LayerStatistics | None], layout: Layout, *, num_layers: int
) -> dict[int, LayerStatistics]:
    """Every layer's sums over all ranks, on the writer; elsewhere none.  Collective.

    own: of this rank's layers, on the CPU, and emptied here; None = it saw no sequence.  The first
        data-parallel rank saw some.  Kept inputs come one data-parallel rank after the other.
    """
    groups = layout.groups
    stages: list[Any] = [None] * groups.pp.size()
    torch.distributed.all_gather_object(stages, list(own), group=groups.pp)
    found = {}
    for index in range(num_layers):
        whole = None
        if index in own:
            whole = _combined(own.pop(index), LayerStatistics.__add__, group=groups.dp)
            if groups.dp.rank() == 0:
                whole = _combined(
                    _of_heads(whole, groups.tp), LayerStatistics.join, group=groups.tp
                )
        if groups.dp.rank() == groups.tp.rank() == 0:
            stage = next(rank for rank, owned in enumerate(stages) if index in owned)
            whole = _at_first(whole, source=stage, group=groups.pp)
        if layout.is_writer:
            assert whole is not None, "the first data-parallel rank saw a sequence"
            found[index] = whole
    return found


def _of_heads(statistics: LayerStatistics | None, group: ProcessGroup) -> LayerStatistics | None:
    """What `join` reads of a tensor-parallel rank: sums that are the same on all stay behind."""
    if statistics is None or group.rank() == 0:
        return statistics
    return replace(statistics, moment_DD=statistics.moment_DD.new_empty(0))


def _combined(
    own: LayerStatistics | None, combine: Combine, *, group: ProcessGroup
) -> LayerStatistics | None:
    """On a group's first rank, what all its ranks have, in their order; elsewhere nothing."""
    for rank in range(1, group.size()):
        other = _at_first(own, source=rank, group=group)
        if group.rank() == 0 and own is not None and other is not None:
            own = combine(own, other)
    return own if group.rank() == 0 else None


def _at_first(
    own: LayerStatistics | None, *, source: int, group: ProcessGroup
) -> LayerStatistics | None:
    """On a group's first rank, what another has; elsewhere nothing."""
    if source == group.rank() == 0:
        return own
    if source == group.rank():
        torch.distributed.send_object_list([own], group_dst=0, group=group)
    if source == 0 or group.rank() != 0:
        return None
    received: list[Any] = [None]
    torch.distributed.recv_object_list(received, group_src=source, group=group)
    return received[0]
