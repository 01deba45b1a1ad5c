"""Whether a checkpoint fits the run that loads it, checked as a whole before anything is loaded.

Megatron swallows missing and extra tensors, does not look at choices that no shape shows (how many
heads, which rotary base), and stops in the middle where two optimizers differ.  Here all of that is
found first.  What may change is listed by checkpoint_changes.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch.distributed
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.optimizer import MegatronOptimizer

from megatron_ext.upstream.checkpoint_schedule import group_problems, parameter_groups

_UNSEEN = {
    "num_attention_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "vocab_size": "--vocab-size",
    "position_embedding_type": "--position-embedding-type",
    "latent_layout": "--latent-layout",
    "latent_pairs": "--latent-pairs",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "rotary_interleaved": "--rotary-interleaved",
    "rotary_scaling_factor": "--rotary-scaling-factor",
    "use_rope_scaling": "--use-rope-scaling",
    "rotary_seq_len_interpolation_factor": "--rotary-seq-len-interpolation-factor",
    "normalization": "--normalization",
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "squared_relu": "--squared-relu",
    "quick_geglu": "--quick-geglu",
    "moe_router_topk": "--moe-router-topk",
    "moe_router_pre_softmax": "--moe-router-pre-softmax",
    "moe_router_score_function": "--moe-router-score-function",
}
"""Choices that change what the same tensors compute, and their flags."""
_DISTRIBUTED = "distrib_optim_sharding_type"
_ANY_LAYOUT = ("fully_reshardable", "fully_sharded_model_space")
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
)


def model_differences(args: Namespace, saved_args: Namespace) -> list[str]:
    """Choices of the model that no tensor shows and that are not the checkpoint's."""
    missing = object()
    found = []
    for name, flag in _UNSEEN.items():
        before, now = getattr(saved_args, name, missing), getattr(args, name, missing)
        if missing not in (before, now) and before != now:
            found.append(f"{flag} is {now}, the checkpoint has {before}.")
    return found


def optimizer_problems(
    args: Namespace,
    *,
    optimizer: MegatronOptimizer,
    saved_args: Namespace,
    metadata: Mapping[str, Any],
    saved: Mapping[Any, Any] | None,
) -> list[str]:
    """Why the optimizer cannot take the saved state.

    metadata: the checkpoint's content metadata.  saved: its optimizer state without tensors.
    """
    drop = "or drop its optimizer state with --no-load-optim."
    if saved is None or getattr(saved_args, "no_save_optim", False):
        return [
            "the checkpoint has no optimizer state (--no-save-optim): add --no-load-optim to start "
            "a new one, or --finetune to start again from its weights."
        ]
    if (_DISTRIBUTED in metadata) != args.use_distributed_optimizer:
        add_or_drop = "add" if _DISTRIBUTED in metadata else "drop"
        return [
            "Megatron cannot change between the distributed and the plain optimizer: "
            f"{add_or_drop} --use-distributed-optimizer as for the run that saved it, {drop}"
        ]
    before, now = _precision(saved_args), _precision(args)
    if before != now and not args.use_distributed_optimizer:
        return [
            f"the plain optimizer cannot change its precision from {before} to {now}: use "
            f"{before}, {drop}"
        ]
    changed = [
        f"--{name.replace('_', '-')} {before} to {now}"
        for name in _SIZES
        if (before := getattr(saved_args, name, None) or 1) != (now := getattr(args, name) or 1)
    ]
    if changed and metadata.get(_DISTRIBUTED, _ANY_LAYOUT[0]) not in _ANY_LAYOUT:
        return [
            f"its optimizer state ({metadata[_DISTRIBUTED]}) fits only the layout it was saved on, "
            f"and the run changes {', '.join(changed)}: load and save it once on its own layout "
            f"with --dist-ckpt-optim-fully-reshardable, {drop}"
        ]
    experts = [getattr(a, "expert_model_parallel_size", 1) for a in (saved_args, args)]
    if (experts[0] > 1) != (experts[1] > 1):
        return [
            f"Megatron cannot change --expert-model-parallel-size from {experts[0]} to "
            f"{experts[1]}: experts have an optimizer of their own only above 1. Stay at 1 or "
            f"above 1, {drop}"
        ]
    return group_problems(optimizer, parameter_groups(saved))


def tensor_problems(
    state: dict[str, Any], *, contents: Mapping[str, Any], with_optimizer: bool
) -> list[str]:
    """Every tensor that is missing in the checkpoint, extra or misshapen.  Collective.

    state: what will be asked of it.  contents: its tensors and objects, by key.
    """
    wanted = _tensors_of_job(state)
    found = {
        key: tuple(tensor.global_shape)
        for key, tensor in contents.items()
        if isinstance(tensor, ShardedTensor)
        and (with_optimizer or not key.startswith(("optimizer.", "chained_")))
    }
    lines = [
        f"missing: {key} {list(wanted[key][0])}" for key in sorted(wanted.keys() - found.keys())
    ]
    lines += [f"extra: {key} {list(found[key])}" for key in sorted(found.keys() - wanted.keys())]
    for key in sorted(wanted.keys() & found.keys()):
        shape, has_free_rows = wanted[key]
        first = 1 if has_free_rows else 0
        if len(shape) != len(found[key]) or shape[first:] != found[key][first:]:
            lines.append(f"misshapen: {key} is {list(found[key])}, the model has {list(shape)}")
    return lines


def _precision(args: Namespace) -> str:
    bf16, fp16 = getattr(args, "bf16", False), getattr(args, "fp16", False)
    return "--bf16" if bf16 else "--fp16" if fp16 else "fp32 (neither --bf16 nor --fp16)"


def _tensors_of_job(state: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Tensor -> (its global shape, whether its number of rows is free) over all ranks."""
    copied: Any = extract_matching_values(state, lambda _: False)[1]
    apply_factories(copied)
    mine = {
        value.key: (tuple(value.global_shape), bool(value.allow_shape_mismatch))
        for value in nested_values(copied)
        if isinstance(value, ShardedTensor)
    }
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, mine)
    return {key: shape for part in everywhere for key, shape in part.items()}
