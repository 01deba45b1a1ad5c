"""Our microbatches as Megatron takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ext.packing.plan import ReplicaLayout
from megatron_ext.packing.types import Microbatch
from megatron_ext.upstream.arguments import Options
from megatron_ext.upstream.layout import Layout


def replica_of(layout: Layout, options: Options) -> ReplicaLayout:
    """What packing needs to know of this rank's place."""
    interleaved = layout.num_chunks > 1
    group = options.megatron.microbatch_group_size_per_vp_stage or layout.pp_size
    return ReplicaLayout(
        dp_size=layout.dp_size,
        dp_rank=layout.dp_rank,
        pipeline_size=layout.pp_size,
        group_size=group if interleaved else None,
        sequence_multiple=layout.tp_size if layout.sequence_parallel else 1,
    )


def to_device(microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """The microbatches on this rank's device."""
    if not torch.cuda.is_available():
        return list(microbatches)
    device = torch.device("cuda", torch.cuda.current_device())
    return [
        replace(
            m,
            tokens_BS=m.tokens_BS.to(device, non_blocking=True),
            positions_BS=m.positions_BS.to(device, non_blocking=True),
            labels_BS=m.labels_BS.to(device, non_blocking=True),
            weights_BS=m.weights_BS.to(device, non_blocking=True),
            padding_BS=m.padding_BS.to(device, non_blocking=True),
            cu_seqlens=None if m.cu_seqlens is None else m.cu_seqlens.to(device),
            extras={name: values.to(device) for name, values in m.extras.items()},
        )
        for m in microbatches
    ]


def padding_mask(microbatch: Microbatch, chunk: GPTModel) -> Tensor | None:
    """The padding [B, S], as a model chunk with experts takes it; None for a dense one.

    Megatron's first stage cuts it over the tensor-parallel ranks itself, later ones do not.
    """
    if not chunk.config.num_moe_experts:
        return None
    mask_BS, group = microbatch.padding_BS, chunk.pg_collection.tp
    if chunk.pre_process or not chunk.config.sequence_parallel:
        return mask_BS
    return mask_BS.chunk(group.size(), dim=1)[group.rank()]


def packed_params(microbatch: Microbatch) -> PackedSeqParams | None:
    """Megatron's description of a packed row; None for padded rows.

    The longest segment is stated exactly: Megatron restarts rotary positions only if it differs
    from the length of the row.
    """
    if microbatch.cu_seqlens is None:
        return None
    longest = int(microbatch.cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=microbatch.cu_seqlens,
        cu_seqlens_kv=microbatch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
