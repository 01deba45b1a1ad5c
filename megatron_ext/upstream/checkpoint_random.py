"""Random states in a checkpoint, of every rank.

Megatron saves one state per tensor- and pipeline-parallel rank and gives it to all data-parallel
ranks.  Ours drift apart: with dropout, a rank draws as many numbers as its samples are long.  So
each rank's own state is saved beside Megatron's, and restored when the layout is the same.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.training.checkpointing import get_rng_state

from megatron_ext.upstream.layout import Layout

_OF_GRID = "rng_state"
"""Megatron's entry: one state per pipeline and tensor rank."""
_OF_RANKS = "megatron_ext_rng_state"
_GRID = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_LAYOUT = (
    *_GRID,
    "world_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def random_states(layout: Layout) -> dict[str, ShardedObject]:
    """This rank's random states, as Megatron and as we save them.  Collective."""
    groups = layout.groups
    grid: Any = get_rng_state(
        "torch_dist", groups.tp, groups.pp, dp_cp_group=groups.dp_cp, dp_group=groups.dp
    )
    own = replace(
        grid,
        key=_OF_RANKS,
        global_shape=(torch.distributed.get_world_size(),),
        global_offset=(torch.distributed.get_rank(),),
        replica_id=0,
    )
    return {_OF_GRID: grid, _OF_RANKS: own}


def restorable(args: Namespace, *, saved_args: Namespace, keys: Collection[str]) -> str | None:
    """Which saved entry continues the streams of this job's ranks; None: there is none.

    keys: of the objects in the checkpoint.
    """
    if _OF_RANKS in keys and _same(args, saved_args, _LAYOUT):
        return _OF_RANKS
    return _OF_GRID if _OF_GRID in keys and _same(args, saved_args, _GRID) else None


def restore_random(saved: list[dict[str, Any]], *, layout: Layout) -> bool:
    """Continue the saved streams; False, and nothing changes, if they are of another device."""
    own = saved[layout.dp_rank if len(saved) > 1 else 0]
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    if not _same_kind(own["rng_tracker_states"], tracker.get_states()):
        return False
    is_graph_safe = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    random.setstate(own["random_rng_state"])
    np.random.set_state(own["np_rng_state"])
    torch.set_rng_state(own["torch_rng_state"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda_rng_state"])
    tracker.set_states(
        {
            name: tensor_parallel.convert_cuda_rng_state(state, to_graphable=is_graph_safe)
            for name, state in own["rng_tracker_states"].items()
        }
    )
    return True


def _same(args: Namespace, saved_args: Namespace, names: tuple[str, ...]) -> bool:
    return all(getattr(args, name) == getattr(saved_args, name, None) for name in names)


def _same_kind(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """A state of a CPU generator is longer than one of a GPU's."""
    return saved.keys() == current.keys() and all(
        not torch.is_tensor(state)
        or not torch.is_tensor(current[name])
        or state.shape == current[name].shape
        for name, state in saved.items()
    )
