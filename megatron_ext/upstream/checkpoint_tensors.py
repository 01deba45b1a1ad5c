"""Weights to and from a folder, and the plain reading and writing that all checkpoints share."""

from __future__ import annotations

import queue
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    load_sharded_metadata,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.transformer.module import MegatronModule

from megatron_ext.upstream import checkpoint_folder as folders
from megatron_ext.upstream.checkpoint_fit import tensor_problems
from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.patches import Patch, applied

_SAVE_PATCHES = (
    Patch(
        target="megatron.core.dist_checkpointing.strategies.filesystem_async:"
        "get_write_results_queue",
        replacement=lambda mp_mode="spawn": queue.Queue(),
        params=("mp_mode",),
        why="starts a process for a queue that a synchronous save only uses from its own threads; "
        "it imports the training script again (10 s) and outlives a kill of its rank",
        remove_when="Megatron saves synchronously without a multiprocessing manager",
    ),
)


def save_weights(chunks: Sequence[MegatronModule], layout: Layout, *, folder: Path) -> None:
    """Save only the weights of bare model chunks, in the same format.  Collective.

    ``folder`` appears when all ranks are done; an existing one is replaced.
    """
    metadata = {"dp_cp_group": layout.dp_cp_group}
    partial = on_writer(layout, lambda: folders.begin(folder))
    write(weights_state(chunks, metadata=metadata), partial)
    on_writer(layout, lambda: folders.put_in_place(partial, folder))


def load_weights(chunks: Sequence[MegatronModule], layout: Layout, *, folder: Path) -> None:
    """Load only the weights of bare model chunks from any checkpoint.  Collective.

    Raises:
        ValueError: tensors are missing, extra or misshapen; all of them are listed.
    """
    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    state = weights_state(chunks, metadata=metadata | {"dp_cp_group": layout.dp_cp_group})
    contents = load_sharded_metadata(str(folder))
    refuse(folder, tensor_problems(state, contents=contents, with_optimizer=False))
    loaded: Any = dist_checkpointing.load(state, str(folder))
    set_weights(chunks, loaded)


def weights_state(chunks: Sequence[MegatronModule], *, metadata: dict[str, Any]) -> dict[str, Any]:
    """Megatron's description of the weights on this rank, by chunk."""
    return {
        key: chunk.sharded_state_dict(metadata=metadata)
        for key, chunk in zip(_keys(chunks), chunks, strict=True)
    }


@torch.no_grad()
def set_weights(chunks: Sequence[MegatronModule], loaded: dict[str, Any]) -> None:
    """Copy loaded weights into the chunks."""
    for key, chunk in zip(_keys(chunks), chunks, strict=True):
        chunk.load_state_dict(loaded[key], strict=True)


def write(state: dict[str, Any], folder: Path, **options: Any) -> None:
    """Write a state to an empty folder; options: of ``dist_checkpointing.save``.  Collective."""
    with applied(() if torch.cuda.is_available() else _SAVE_PATCHES):
        dist_checkpointing.save(state, str(folder), **options)


def read(args: Namespace, state: dict[str, Any], folder: Path, layout: Layout) -> dict[str, Any]:
    """The checkpoint's values for a state, and what it holds beside tensors.  Collective."""
    strategy: Any = get_default_load_sharded_strategy(str(folder))
    if args.ckpt_fully_parallel_load:
        strategy = FullyParallelLoadStrategyWrapper(strategy, layout.dp_cp_group)
    loaded: Any = dist_checkpointing.load(
        state,
        str(folder),
        strategy,
        strict="raise_unexpected",
        verify_integrity=args.verify_integrity,
    )
    return loaded


def refuse(folder: Path, problems: Sequence[str]) -> None:
    """Raise all reasons, if there are any, as one ValueError."""
    if problems:
        raise ValueError(
            f"{folder} does not fit this run; nothing was loaded. Use the flags it was saved with, "
            "another checkpoint, or what is said here:\n  " + "\n  ".join(problems)
        )


def on_writer[Result](layout: Layout, action: Callable[[], Result]) -> Result:
    """Do it on the writing rank; its result, or its error, on every rank.  Collective."""
    outcome: list[Any] = [None, None]
    if layout.is_writer:
        try:
            outcome[0] = action()
        except (OSError, ValueError) as error:
            outcome[1] = error
    torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _keys(chunks: Sequence[MegatronModule]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
