"""Weights to and from a folder, and the plain reading and writing that all checkpoints share."""

from __future__ import annotations

import queue
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.transformer.module import MegatronModule

from megatron_ext.upstream import checkpoint_folder as folders
from megatron_ext.upstream.checkpoint_fit import tensor_problems
from megatron_ext.upstream.checkpoint_reading import common_of, contents_of, damaged, values_of
from megatron_ext.upstream.checkpoint_shared import (
    NotOneFolderError,
    in_order,
    on_writer,
    problems_of,
    seal,
)
from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.patches import Patch, applied

_EXTRA_STATE = "_extra_state"
"""In the names of what layers save beside weights."""
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
    name = on_writer(layout, lambda: folders.begin(folder).name)
    partial = folder.with_name(name)
    write(weights_state(chunks, metadata=metadata), partial, layout)
    on_writer(layout, lambda: folders.put_in_place(partial, folder))


def load_weights(
    chunks: Sequence[MegatronModule],
    layout: Layout,
    *,
    folder: Path,
    is_verified: bool = False,
    with_checksums: bool = True,
) -> None:
    """Load only the weights of bare model chunks from any checkpoint.  Collective.

    is_verified: its files have been looked at already (`problems_of`).
    with_checksums: else they are only looked at for what is missing or cut short.

    Raises:
        ValueError: it is damaged or not to be trusted, or tensors are missing, extra or misshapen;
            all of them are listed.
    """
    if not is_verified and (bad := problems_of(folder, layout, with_checksums=with_checksums)):
        raise damaged(folder, bad)
    common, contents = in_order(lambda: (common_of(folder), contents_of(folder)))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    state = weights_state(chunks, metadata=metadata | {"dp_cp_group": layout.dp_cp_group})
    refuse(folder, tensor_problems(state, contents=contents, with_optimizer=False))
    set_weights(chunks, in_order(lambda: values_of(folder, state)))


def weights_state(chunks: Sequence[MegatronModule], *, metadata: dict[str, Any]) -> dict[str, Any]:
    """Megatron's description of the weights on this rank, by chunk."""
    return {
        key: chunk.sharded_state_dict(metadata=metadata)
        for key, chunk in zip(_keys(chunks), chunks, strict=True)
    }


@torch.no_grad()
def set_weights(chunks: Sequence[MegatronModule], loaded: dict[str, Any]) -> None:
    """Copy loaded weights into the chunks.

    Not the FP8 state of Transformer Engine's layers, which they would unpickle: nothing of ours
    trains in FP8.
    """
    for key, chunk in zip(_keys(chunks), chunks, strict=True):
        values = {k: None if _EXTRA_STATE in k else value for k, value in loaded[key].items()}
        chunk.load_state_dict(values, strict=True)


def write(state: dict[str, Any], folder: Path, layout: Layout, **options: Any) -> None:
    """Write a state to an empty folder, and checksums beside it.  Collective.

    options: of ``dist_checkpointing.save``.

    Raises:
        NotOneFolderError: the ranks' folders are not one.
        OSError, CheckpointException: it cannot be written.
    """
    with applied(() if torch.cuda.is_available() else _SAVE_PATCHES):
        dist_checkpointing.save(state, str(folder), **options)
    try:
        seal(folder, layout)
    except NotOneFolderError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def read(args: Namespace, state: dict[str, Any], folder: Path, layout: Layout) -> dict[str, Any]:
    """The checkpoint's values for a state, and what it holds beside tensors.  Collective."""
    strategy: Any = get_default_load_sharded_strategy(str(folder))
    if args.ckpt_fully_parallel_load:
        strategy = FullyParallelLoadStrategyWrapper(strategy, layout.dp_cp_group)
    options = {"strict": "raise_unexpected", "verify_integrity": args.verify_integrity}
    if args.ckpt_fully_parallel_load:  # its ranks wait for each other inside
        return values_of(folder, state, strategy, **options)
    return in_order(lambda: values_of(folder, state, strategy, **options))


def refuse(folder: Path, problems: Sequence[str]) -> None:
    """Raise all reasons, if there are any, as one ValueError."""
    if problems:
        raise ValueError(
            f"{folder} does not fit this run; nothing was loaded. Use the flags it was saved with, "
            "another checkpoint, or what is said here:\n  " + "\n  ".join(problems)
        )


def _keys(chunks: Sequence[MegatronModule]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
