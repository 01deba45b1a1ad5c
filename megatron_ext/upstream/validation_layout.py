"""How a model is cut over ranks: every size that a parallel size does not divide."""

from __future__ import annotations

from argparse import Namespace


def layout_problems(args: Namespace) -> list[str]:
    """What does not fit in parallel sizes, ranks and the model's own sizes, all of them >= 1."""
    return [*_rank_problems(args), *_pipeline_problems(args), *_splits(args)]


def not_a_multiple(what: str, value: int, size: int, *, of: str, why: str) -> list[str]:
    """A sentence if ``value`` of the flag ``what`` is not a multiple of ``size``."""
    if value % size == 0:
        return []
    lower = value // size * size
    choices = f"{lower} or {lower + size}" if lower > 0 else f"{size}"
    return [f"--{what} {value} is not a multiple of {of} = {size}: {why}. Use {choices}."]


def _rank_problems(args: Namespace) -> list[str]:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    replica, ranks = tp * pp * cp, args.world_size
    if ranks % replica:
        return [
            f"{ranks} ranks cannot hold replicas of --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = {replica}: "
            f"start a multiple of {replica} (torchrun --nproc-per-node), or lower a size."
        ]
    if args.num_experts is None:
        return [
            f"--{name} {size} needs --num-experts: the model is dense."
            for name, size in (
                ("expert-model-parallel-size", ep),
                ("expert-tensor-parallel-size", args.expert_tensor_parallel_size or 1),
            )
            if size > 1
        ]
    etp = args.expert_tensor_parallel_size or tp
    found = not_a_multiple(
        "num-experts",
        args.num_experts,
        ep,
        of="--expert-model-parallel-size",
        why="each rank holds equally many experts",
    )
    if ranks % (etp * ep * pp):
        found.append(
            f"{ranks} ranks cannot hold experts cut by --expert-model-parallel-size {ep} x expert "
            f"tensor parallelism {etp} x --pipeline-model-parallel-size {pp} = {etp * ep * pp}: "
            f"start a multiple of {etp * ep * pp}, or lower a size "
            "(--expert-tensor-parallel-size 1 leaves each expert whole)."
        )
    return found


def _pipeline_problems(args: Namespace) -> list[str]:
    pp, per_chunk = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    per_rank = args.num_virtual_stages_per_pipeline_rank
    interleaving = {
        "num-layers-per-virtual-pipeline-stage": per_chunk,
        "num-virtual-stages-per-pipeline-rank": per_rank,
        "pipeline-model-parallel-layout": args.pipeline_model_parallel_layout,
    }
    named = [f"--{name}" for name, value in interleaving.items() if value is not None]
    if len(named) > 1:
        return [f"{' and '.join(named)} say the same in two ways: use one of them."]
    if named and pp == 1:
        return [
            f"{named[0]} needs --pipeline-model-parallel-size > 1: there is no pipeline to cut."
        ]
    group = args.microbatch_group_size_per_vp_stage
    if group is not None and (per_chunk or per_rank) and group < pp:
        return [
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below "
            f"--pipeline-model-parallel-size {pp}: the pipeline would never fill. Use {pp} or more."
        ]
    return [] if args.num_layers is None else _layer_problems(args)


def _layer_problems(args: Namespace) -> list[str]:
    """Layers per stage; uneven cuts are Megatron's to check, but for the layers of the stages."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    ends = [
        (f"--decoder-{end}-pipeline-num-layers", size)
        for end, size in (("first", first), ("last", last))
        if size
    ]
    left = args.num_layers - sum(size for _, size in ends)
    stages = args.pipeline_model_parallel_size - len(ends)
    is_cut = left >= 0 and (left % stages == 0 if stages > 0 else left == 0)
    if ends and not is_cut:
        shown = " and ".join(f"{flag} {size}" for flag, size in ends)
        return [
            f"{shown} of --num-layers {args.num_layers}: {left} layers are left for {stages} other "
            "pipeline stages, which hold equally many. Use other sizes."
        ]
    uneven = (
        args.pipeline_model_parallel_layout,
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
        args.account_for_embedding_in_pipeline_split or None,
        args.account_for_loss_in_pipeline_split or None,
    )
    if any(value is not None for value in uneven):
        return []
    size, of = args.pipeline_model_parallel_size, "--pipeline-model-parallel-size"
    for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        if getattr(args, name):
            size *= getattr(args, name)
            of += f" x --{name.replace('_', '-')}"
    why = "all stages hold equally many layers"
    return not_a_multiple("num-layers", args.num_layers, size, of=of, why=why)


def _splits(args: Namespace) -> list[str]:
    """Dimensions that are cut into heads, or over tensor-parallel ranks."""
    tp = args.tensor_model_parallel_size
    heads, groups = args.num_attention_heads, args.num_query_groups
    found = []
    if heads and args.group_query_attention:
        of = "--num-query-groups"
        why = "each key/value head serves equally many query heads"
        found += not_a_multiple("num-attention-heads", heads, groups, of=of, why=why)
        if groups % tp and tp % groups:
            found.append(
                f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must be "
                "a multiple of the other, so that ranks share key/value heads evenly."
            )
    if args.hidden_size and heads and args.kv_channels is None:
        of, why = "--num-attention-heads", "it is cut into heads (or give --kv-channels)"
        found += not_a_multiple("hidden-size", args.hidden_size, heads, of=of, why=why)
    if args.sequence_parallel and tp == 1:
        found.append(
            "--sequence-parallel needs --tensor-model-parallel-size > 1: it splits the sequence "
            "over the tensor-parallel ranks."
        )
    split = {
        "num-attention-heads": "heads are split over these ranks",
        "ffn-hidden-size": "the MLP is split over these ranks",
        "moe-shared-expert-intermediate-size": "the shared expert is split over these ranks",
        "padded-vocab-size": "the vocabulary is split over these ranks",
    }
    if args.sequence_parallel:
        split["seq-length"] = "sequence parallelism splits the sequence"
    for name, why in split.items():
        value = getattr(args, name.replace("-", "_"))
        if value:
            of = "--tensor-model-parallel-size"
            found += not_a_multiple(name, value, tp, of=of, why=why)
    if args.num_experts and args.moe_ffn_hidden_size:
        size = args.expert_tensor_parallel_size or tp
        of, why = "expert tensor parallelism", "each expert is split over these ranks"
        found += not_a_multiple(
            "moe-ffn-hidden-size", args.moe_ffn_hidden_size, size, of=of, why=why
        )
    return found
