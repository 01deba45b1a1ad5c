"""From the samples of a global batch to the microbatches of one data-parallel rank.

Every rank computes the same plan from the same samples, so nothing is communicated.
Invariant the tests check: the loss and gradient of the step do not depend on packing, budget,
number
of ranks or pipeline; every sample is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.packing.balance import Batches, allocate, equalize
from megatron_ext.packing.batch import RowLayout, Sample, build_microbatches, fit_samples
from megatron_ext.packing.config import PackingConfig
from megatron_ext.packing.pack import CAPACITY_FLAG
from megatron_ext.packing.types import Microbatch
from megatron_ext.packing.weights import loss_weights


@dataclass(frozen=True, kw_only=True)
class ReplicaLayout:
    """What packing needs to know of the parallel layout."""

    dp_size: int = 1
    dp_rank: int = 0
    pipeline_size: int = 1
    group_size: int | None = None
    """Microbatches a virtual stage runs at a time; None = not interleaved."""
    sequence_multiple: int = 1
    """What row lengths must be a multiple of: the tensor-parallel size under sequence parallelism,
    else 1."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One rank's microbatches of a step, and figures of the whole step."""

    microbatches: list[Microbatch]
    num_samples: int
    """Samples of the global batch that are trained (not dropped)."""
    num_tokens: int
    """Tokens of those samples, padding excluded."""
    num_positions: int
    """Positions this rank computes, padding included."""
    num_truncated: int
    num_dropped: int


def plan_step(
    samples: Sequence[Sample],
    config: PackingConfig,
    *,
    replica: ReplicaLayout,
    seq_length: int,
    micro_batch_size: int,
    global_batch_size: int | None = None,
) -> StepPlan:
    """The microbatches of ``replica.dp_rank`` for one step over ``samples``, the global batch.

    seq_length: longest sequence and default row capacity.  micro_batch_size: sequences of a padded
    microbatch where no token budget is set.  global_batch_size: fixed N of the modes that take one;
    default: the number of samples.
    """
    capacity = config.row_capacity(seq_length=seq_length)
    limit = min(capacity, seq_length) if config.packing else seq_length
    flag = CAPACITY_FLAG if limit < seq_length else "--seq-length"
    kept, fitted = fit_samples(samples, limit, overlong=config.overlong, flag=flag)
    ranks = _assign(
        kept, config, replica=replica, capacity=capacity, micro_batch_size=micro_batch_size
    )
    mine = ranks[replica.dp_rank]
    loss = loss_weights(
        [sample.mask for sample in kept],
        microbatches=mine,
        mode=config.loss_normalization,
        packed=config.packing,
        turn_ids=_turn_ids(kept) if config.loss_normalization == "turn-mean" else None,
        max_length=config.loss_normalization_max_length or None,
        global_batch_size=config.fixed_denominator(
            global_batch_size=global_batch_size or len(samples)
        ),
        counts_global_batch=replica.dp_rank == 0,
    )
    layout = RowLayout(
        packed=config.packing,
        pad_to_multiple=replica.sequence_multiple,
        capacity=capacity if config.packing and config.pad_rows_to_capacity else None,
        max_segments=config.max_sequences_per_row or None if config.packing else None,
        extras={name: values.dtype for name, values in kept[0].extras.items()} if kept else {},
    )
    microbatches = build_microbatches(kept, microbatches=mine, loss=loss, layout=layout)
    return StepPlan(
        microbatches=microbatches,
        num_samples=len(kept),
        num_tokens=sum(len(sample.tokens) for sample in kept),
        num_positions=sum(microbatch.num_positions for microbatch in microbatches),
        num_truncated=fitted.num_truncated,
        num_dropped=fitted.num_dropped,
    )


def _assign(
    samples: Sequence[Sample],
    config: PackingConfig,
    *,
    replica: ReplicaLayout,
    capacity: int,
    micro_batch_size: int,
) -> list[Batches]:
    """[rank][microbatch] -> sample indices, the same legal number of microbatches on every rank.

    Without a sample every rank gets fillers, so that it joins the collectives of the step.
    """
    if samples and (config.packing or config.max_tokens_per_microbatch):
        return allocate(
            [len(sample.tokens) for sample in samples],
            max_tokens=capacity,
            data_parallel_size=replica.dp_size,
            packing=config.packing,
            attention_weight=config.balance_attention_weight,
            pipeline_size=replica.pipeline_size,
            group_size=replica.group_size,
            max_segments=config.max_sequences_per_row or None if config.packing else None,
        )
    indices = list(range(len(samples)))
    batches = [indices[i : i + micro_batch_size] for i in range(0, len(indices), micro_batch_size)]
    ranks = [batches[rank :: replica.dp_size] for rank in range(replica.dp_size)]
    return equalize(
        ranks, minimum=1, pipeline_size=replica.pipeline_size, group_size=replica.group_size
    )


def _turn_ids(samples: Sequence[Sample]) -> list:
    missing = [i for i, sample in enumerate(samples) if sample.turn_ids is None]
    if missing:
        raise ValueError(
            f"--loss-normalization turn-mean needs turns, but sample {missing[0]} has none: train "
            "on data with messages, or use another normalization."
        )
    return [sample.turn_ids for sample in samples]
