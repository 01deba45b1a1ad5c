"""Checkpoints in Megatron's ``torch_dist`` format that are complete or absent, and strict to load.

Any TP, PP, VPP and DP loads them (fully reshardable optimizer).  Files and keys are Megatron's own:
Megatron loads ours, we load Megatron's.  How a folder appears as a whole: checkpoint_folder.py;
what is checked before anything is loaded: checkpoint_fit.py and checkpoint_schedule.py.
Invariant the tests check: saved, killed and resumed == uninterrupted, bit for bit.
Not covered: asynchronous saving, the legacy and FSDP formats.
"""

from __future__ import annotations

import logging
import shutil
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.training.checkpointing import _build_sharded_state_dict_metadata
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.upstream import checkpoint_folder as folders
from megatron_ext.upstream.checkpoint_changes import changes, unresumable
from megatron_ext.upstream.checkpoint_fit import (
    model_differences,
    optimizer_problems,
    tensor_problems,
)
from megatron_ext.upstream.checkpoint_random import random_states, restorable, restore_random
from megatron_ext.upstream.checkpoint_reading import common_of, contents_of
from megatron_ext.upstream.checkpoint_schedule import (
    parameter_groups,
    restore_schedule,
    schedule_problems,
    settle_rates,
)
from megatron_ext.upstream.checkpoint_shared import (
    NotOneFolderError,
    check_one_folder,
    in_order,
    on_writer,
)
from megatron_ext.upstream.checkpoint_source import Source, check_target, intact_source
from megatron_ext.upstream.checkpoint_tensors import (
    load_weights,
    read,
    refuse,
    save_weights,
    set_weights,
    weights_state,
    write,
)
from megatron_ext.upstream.layout import Layout
from megatron_ext.upstream.model import TrainableModel

__all__ = ["Progress", "load_weights", "resume", "save", "save_weights"]

logger = logging.getLogger(__name__)

_OURS = "megatron_ext"
_OF_ONE_RANK = ("rank", "local_rank")
"""Arguments that differ between ranks."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    """Finished updates; 0 = a new run."""
    consumed_samples: int = 0
    """Position in the order of the samples."""
    idle_steps: int = 0
    """Steps in a row, up to this one, without anything to train."""


def save(
    args: Namespace,
    model: TrainableModel,
    layout: Layout,
    *,
    progress: Progress,
    samples_id: str = "",
    keep: int = 0,
) -> None:
    """Save model, optimizer, schedule and random states of a step under ``--save``.  Collective.

    samples_id: identifies the training samples; empty = not known.
    keep: newest checkpoints kept; 0 = all.

    Raises:
        OSError: it cannot be written, or the ranks' folders are not one; earlier checkpoints are
            as they were.
    """
    model.settle_parameters()
    root, step = Path(args.save), progress.step
    metadata = _build_sharded_state_dict_metadata(args, dp_cp_group=layout.dp_cp_group)
    state = _tensors(model, metadata=metadata, with_optimizer=not args.no_save_optim)
    state |= _plain_values(args, model, progress=progress, samples_id=samples_id)
    state |= {} if args.no_save_rng else random_states(layout)
    strategy = get_default_save_sharded_strategy()
    if args.ckpt_fully_parallel_save:
        strategy = FullyParallelSaveStrategyWrapper(strategy, layout.dp_cp_group)
    partial = root / on_writer(layout, lambda: _begin(root, step).name)
    try:
        write(
            state,
            partial,
            layout,
            sharded_strategy=strategy,
            content_metadata={k: value for k, value in metadata.items() if k != "dp_cp_group"},
            verify_integrity=args.verify_integrity,
        )
        on_writer(layout, lambda: folders.publish(partial, root=root, step=step, keep=keep))
    except NotOneFolderError:
        raise
    except (OSError, CheckpointException) as error:
        if layout.is_writer:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(_not_written(root, step)) from error


def resume(
    args: Namespace, model: TrainableModel, layout: Layout, *, samples_id: str = ""
) -> Progress:
    """Go on from the checkpoint that the flags name, if there is one.  Collective.

    On the layout it was saved with, everything goes on bit for bit; on another one up to rounding,
    with random states seeded afresh (they belong to ranks that no longer exist).  ``--finetune``,
    ``--pretrained-checkpoint`` and a release give only their weights to a new run.

    Raises:
        OSError: ``--save`` cannot be written to, or is not one folder for all ranks.
        ValueError: there is no such checkpoint, or it does not fit the flags: all reasons at once.
    """
    source = _source(args, layout)
    if source is None:
        return Progress()
    if source.only_weights:
        common = in_order(lambda: common_of(source.folder))
        differences = model_differences(args, common.get("args", Namespace()))
        _warn(layout, f"{source.folder} was trained with other choices", differences)
        load_weights(model.bare_chunks, layout, folder=source.folder, is_verified=True)
        model.optimizer.reload_model_params()
        return Progress()
    progress = _continue(args, model, layout, folder=source.folder, samples_id=samples_id)
    if progress.step >= args.train_iters:
        done = f"{source.folder} is of step {progress.step}, --train-iters is {args.train_iters}"
        _warn(layout, "nothing is left to train", [done])
    return progress


def _source(args: Namespace, layout: Layout) -> Source | None:
    source = intact_source(args, layout)
    on_writer(layout, lambda: check_target(args, source))
    if args.save:
        check_one_folder(Path(args.save), layout)
    return source


def _continue(
    args: Namespace, model: TrainableModel, layout: Layout, *, folder: Path, samples_id: str
) -> Progress:
    common, contents = in_order(lambda: (common_of(folder), contents_of(folder)))
    saved_args = common["args"]
    state = _fitting_state(args, model, layout, folder=folder, common=common, contents=contents)
    keys = {entry.key for entry in contents.values()}
    entry = None if args.no_load_rng else restorable(args, saved_args=saved_args, keys=keys)
    state |= {entry: random_states(layout)[entry]} if entry else {}
    loaded = read(args, state, folder, layout)
    set_weights(model.bare_chunks, loaded)
    if args.no_load_optim:
        model.optimizer.reload_model_params()
    else:
        _restore_optimizer(args, model, loaded)
    if not args.no_load_rng and not (entry and restore_random(loaded[entry], layout=layout)):
        reason = "it has none for this layout and device"
        _warn(layout, f"{folder}: random states are seeded afresh", [reason])
    saved_id = common.get(_OURS, {}).get("samples_id", "")
    other = changes(args, saved_args=saved_args, samples_id=samples_id, saved_samples_id=saved_id)
    _warn(layout, f"{folder} goes on, but not as it would have", other)
    torch.distributed.barrier()
    return Progress(
        step=common["iteration"],
        consumed_samples=saved_args.consumed_train_samples,
        idle_steps=common.get(_OURS, {}).get("idle_steps", 0),
    )


def _fitting_state(
    args: Namespace,
    model: TrainableModel,
    layout: Layout,
    *,
    folder: Path,
    common: dict[str, Any],
    contents: dict[str, Any],
) -> dict[str, Any]:
    """What to read from the checkpoint; raises every reason why it does not fit."""
    saved_args, schedule = common["args"], common.get("opt_param_scheduler", {})
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    problems = model_differences(args, saved_args) + unresumable(args, saved_args)
    with_optimizer = not args.no_load_optim
    if with_optimizer:
        unfit = optimizer_problems(
            args,
            optimizer=model.optimizer,
            saved_args=saved_args,
            metadata=metadata,
            saved=common.get("optimizer"),
        )
        with_optimizer = not unfit
        problems += unfit + schedule_problems(
            args, scheduler=model.scheduler, saved_args=saved_args, saved=schedule
        )
    state = _tensors(
        model,
        metadata=metadata | {"dp_cp_group": layout.dp_cp_group},
        with_optimizer=with_optimizer,
        is_loading=True,
    )
    problems += tensor_problems(state, contents=contents, with_optimizer=with_optimizer)
    refuse(folder, problems)
    return state


@torch.no_grad()
def _restore_optimizer(args: Namespace, model: TrainableModel, loaded: dict[str, Any]) -> None:
    if _has_parameters(model):
        saved = parameter_groups(loaded["optimizer"])
        settle_rates(args, optimizer=model.optimizer, saved=saved)
        model.optimizer.load_state_dict(loaded["optimizer"])
    restore_schedule(args, scheduler=model.scheduler, saved=loaded["opt_param_scheduler"])


def _tensors(
    model: TrainableModel,
    *,
    metadata: dict[str, Any],
    with_optimizer: bool,
    is_loading: bool = False,
) -> dict[str, Any]:
    """Megatron's description of the model's and the optimizer's tensors on this rank."""
    state = weights_state(model.bare_chunks, metadata=metadata)
    if with_optimizer and _has_parameters(model):
        state["optimizer"] = model.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
    return state


def _has_parameters(model: TrainableModel) -> bool:
    """Whether this rank trains any; else Megatron gives it an optimizer without a state."""
    return not getattr(model.optimizer, "is_stub_optimizer", False)


def _plain_values(
    args: Namespace, model: TrainableModel, *, progress: Progress, samples_id: str
) -> dict[str, Any]:
    """What is saved beside tensors and random states, the same on every rank."""
    saved_args = {name: value for name, value in vars(args).items() if name not in _OF_ONE_RANK}
    saved_args["consumed_train_samples"] = progress.consumed_samples
    schedule = {} if args.no_save_optim else {"opt_param_scheduler": model.scheduler.state_dict()}
    return {
        "args": Namespace(**saved_args),
        "checkpoint_version": 3.0,
        "iteration": progress.step,
        _OURS: {"samples_id": samples_id, "idle_steps": progress.idle_steps},
        **schedule,
    }


def _begin(root: Path, step: int) -> Path:
    folders.clear_unfinished(root, "iter_*")
    return folders.begin(folders.folder_of(root, step))


def _not_written(root: Path, step: int) -> str:
    steps = [other for other in folders.complete_steps(root) if other != step]
    before = f"The one of step {steps[-1]} is intact" if steps else "There is none yet"
    return (
        f"--save {root}: the checkpoint of step {step} could not be written "
        f"({folders.free_space(root)} are free there). {before}. Make room or choose another "
        "--save, then start again."
    )


def _warn(layout: Layout, what: str, reasons: Sequence[str]) -> None:
    if reasons and layout.is_writer:
        logger.warning("%s: %s", what, "; ".join(reasons))
