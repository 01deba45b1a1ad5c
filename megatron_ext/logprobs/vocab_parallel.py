"""Log-probabilities and entropy of logits whose vocabulary is split over tensor-parallel ranks.

The idea: every rank reduces its own columns to a few numbers a token, and one all-gather merges
them (`partial_softmax`).  Backward needs no communication: each rank's logits get their gradient.
Padding columns are cut off, never computed.  Sums are in float32 (float64 for float64 logits).

Invariant the tests check: n ranks equal one rank equal `log_softmax` over the real columns, values
and gradients, whatever the padding.  Results are bit-equal on all ranks of the group.
Not covered: the gradient of a gradient.

Legend: T tokens, V the columns of this rank, K statistics, P ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.logprobs.partial_softmax import (
    block_statistics,
    empty_statistics,
    finish_statistics,
    logits_gradient_,
    merge_statistics,
)


class LogProbs(NamedTuple):
    """Per-token results, in float32 (float64 from float64), the same on every rank of the group."""

    logprobs: Tensor
    """[T] log-probability of each label, in nats."""
    entropy: Tensor | None
    """[T] entropy of the distribution each label was drawn from, in nats; None if not wanted."""


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The vocabulary columns of this rank."""

    first_column: int
    """Global index of this rank's first column; the others follow it."""
    num_real: int
    """How many of them are tokens; the rest is padding."""
    vocab_size: int
    """Tokens on all ranks together."""
    tp_group: dist.ProcessGroup | None
    """Ranks that share the vocabulary; None = this rank has all of it."""

    @classmethod
    def of(
        cls, num_columns: int, *, vocab_size: int, tp_group: dist.ProcessGroup | None
    ) -> VocabShard:
        """The calling rank's shard, as Megatron cuts it: `num_columns` a rank, in rank order."""
        rank = dist.get_rank(tp_group) if tp_group is not None else 0
        size = dist.get_world_size(tp_group) if tp_group is not None else 1
        if not 1 <= vocab_size <= size * num_columns:
            raise ValueError(
                f"vocab_size {vocab_size} does not fit the output layer: {num_columns} columns on "
                f"each of {size} tensor-parallel ranks are {size * num_columns}, padding included. "
                "Pass the number of tokens of the tokenizer, before padding."
            )
        first = rank * num_columns
        num_real = min(max(vocab_size - first, 0), num_columns)
        return cls(first_column=first, num_real=num_real, vocab_size=vocab_size, tp_group=tp_group)

    def merge_over_ranks(self, stats_KT: Tensor, *, labels_T: Tensor) -> Tensor:
        """Statistics [K, T] of the whole vocabulary, NaN where the label is not in it.

        One all-gather of K numbers a token; none if there is no token.
        """
        if self.tp_group is not None and stats_KT.numel() > 0:
            parts_KT = [torch.empty_like(stats_KT) for _ in range(self.tp_group.size())]
            dist.all_gather(parts_KT, stats_KT.contiguous(), group=self.tp_group)
            stats_KT = merge_statistics(torch.stack(parts_KT))
        is_outside_T = (labels_T < 0) | (labels_T >= self.vocab_size)
        return stats_KT.masked_fill(is_outside_T, torch.nan)


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> LogProbs:
    """Log-probabilities of `labels_T` [T] (global ids) under softmax(logits / temperature).

    `logits_TV` [T, V] are this rank's, left as they are; padding gets gradient 0.  A label outside
    the vocabulary gives NaN.  Prefer `chunked.selected_logprobs`: it never holds [T, V].
    """
    check_temperature(temperature)
    if logits_TV.ndim != 2 or labels_T.shape != logits_TV.shape[:1]:
        raise ValueError(
            f"logits are {list(logits_TV.shape)} and labels {list(labels_T.shape)}: must be "
            "[T, V] and [T]. Flatten the sequence and batch dimensions of both, in the same order."
        )
    shard = VocabShard.of(logits_TV.shape[1], vocab_size=vocab_size, tp_group=tp_group)
    return LogProbs(
        *_FromLogits.apply(logits_TV, labels_T.long(), shard, temperature, with_entropy)
    )


def check_temperature(temperature: float) -> None:
    """Raise `ValueError` unless the temperature is a positive number."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature {temperature} is not a positive number: log-probabilities are those of "
            "the sampling distribution, softmax(logits / temperature). For greedily decoded "
            "tokens use 1.0."
        )


class _FromLogits(torch.autograd.Function):
    """`vocab_parallel_logprobs` after the checks."""

    @staticmethod
    def forward(ctx, logits_TV, labels_T, shard, temperature, with_entropy):
        ctx.set_materialize_grads(False)
        ctx.shard, ctx.temperature = shard, temperature
        real_TV = _tempered_copy(logits_TV[:, : shard.num_real], temperature)
        if shard.num_real > 0:
            stats_KT = block_statistics(
                real_TV,
                labels_T=labels_T,
                first_column=shard.first_column,
                with_entropy=with_entropy,
            )
        else:
            stats_KT = empty_statistics(labels_T, dtype=real_TV.dtype, with_entropy=with_entropy)
        stats_KT = shard.merge_over_ranks(stats_KT, labels_T=labels_T)
        ctx.save_for_backward(logits_TV, labels_T, stats_KT)
        return finish_statistics(stats_KT)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob_T, grad_entropy_T):
        logits_TV, labels_T, stats_KT = ctx.saved_tensors
        num_real = ctx.shard.num_real
        grad_TV = torch.zeros_like(logits_TV)
        if num_real > 0:
            real_TV = logits_gradient_(
                _tempered_copy(logits_TV[:, :num_real], ctx.temperature),
                labels_T=labels_T,
                first_column=ctx.shard.first_column,
                stats_KT=stats_KT,
                grad_logprob_T=grad_logprob_T,
                grad_entropy_T=grad_entropy_T,
            )
            grad_TV[:, :num_real] = real_TV.div_(ctx.temperature)
        return grad_TV, None, None, None, None


def _tempered_copy(logits_TV: Tensor, temperature: float) -> Tensor:
    """logits / temperature in at least float32, as a copy that may be overwritten."""
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    return logits_TV.to(dtype, copy=True).div_(temperature)
