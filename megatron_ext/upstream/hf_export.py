"""The model chunks of all ranks back to checkpoint tensors, one parameter at a time, on rank 0.

Invariant the tests check: what was loaded comes out bit for bit (in the model's type), from every
layout; the vocabulary's padding is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.upstream.hf_weights import LocalTensor, local_tensors, raise_together
from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.model import bare
from megatron_ext.weights.architecture import Architecture
from megatron_ext.weights.families import parameters
from megatron_ext.weights.operators import Shape, Shard, scatter
from megatron_ext.weights.table import Parameter


@dataclass(frozen=True, kw_only=True)
class _Held:
    """That a rank holds a shard, as it tells the others."""

    name: str
    shard: Shard
    rank: int
    shape: Shape
    dtype: torch.dtype


def export_tensors(
    chunks: Sequence[MegatronModule], layout: Layout, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Name and values of every checkpoint tensor, in the order of `checks.tensor_shapes`.

    Collective: every rank must exhaust the iterator; only rank 0 gets tensors, on the CPU and in
    the model's type.  It holds the checkpoint tensors of one parameter and one shard of that.

    Raises:
        ValueError: on every rank, if the model does not have the architecture.
    """
    local = {
        item.parameter.name: item
        for item in local_tensors(chunks, layout, architecture)
        if not item.parameter.is_copy
    }
    rank = torch.distributed.get_rank()
    holders = _holders(local, rank=rank)
    padded = bare(chunks[0]).vocab_size
    table = parameters(architecture, padded_vocab_size=padded)
    wanted = [parameter for parameter in table if not parameter.is_copy]
    raise_together([f"no rank holds {p.name}" for p in wanted if not _is_whole(holders[p.name])])
    for parameter in wanted:
        shards = holders[parameter.name].values()
        if rank == 0:
            yield from _collect(parameter, shards, local.get(parameter.name))
            continue
        for held in shards:
            if held.rank == rank:
                torch.distributed.send(local[parameter.name].tensor.detach().contiguous(), dst=0)


def _holders(local: dict[str, LocalTensor], *, rank: int) -> dict[str, dict[int, _Held]]:
    """For every parameter and shard index, the first rank that holds it; the same on every rank."""
    mine = [
        _Held(
            name=name,
            shard=item.shard,
            rank=rank,
            shape=tuple(item.tensor.shape),
            dtype=item.tensor.dtype,
        )
        for name, item in local.items()
    ]
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, mine)
    holders: dict[str, dict[int, _Held]] = defaultdict(dict)
    for held in (held for ranks in everywhere for held in ranks):
        holders[held.name].setdefault(held.shard.index, held)
    return holders


def _is_whole(shards: dict[int, _Held]) -> bool:
    return bool(shards) and set(shards) == set(range(next(iter(shards.values())).shard.count))


def _collect(
    parameter: Parameter, shards: Any, mine: LocalTensor | None
) -> Iterator[tuple[str, Tensor]]:
    """On rank 0: a parameter's checkpoint tensors from its shards, received one after the other."""
    tensors: dict[str, Tensor] = {}
    for held in shards:
        if not tensors:
            tensors = {
                name: torch.empty(shape, dtype=torch.float32 if parameter.is_bits else held.dtype)
                for name, shape in parameter.operator.tensors().items()
            }
        if held.rank == 0:
            assert mine is not None, f"rank 0 said that it holds {held.name}"
            values = mine.tensor.detach()
        else:
            device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
            values = torch.empty(held.shape, dtype=held.dtype, device=device)
            torch.distributed.recv(values, src=held.rank)
        scatter(values, parameter.operator, shard=held.shard, tensors=tensors)
    yield from tensors.items()
