"""Log-probabilities and entropy from hidden states, never holding the logits of all tokens.

The idea: logits are computed as tiles of all tokens x a few vocabulary columns, each reduced at
once to its softmax statistics (`partial_softmax`), and computed again, tile by tile, in backward.
Tiles of columns rather than of tokens, because then the weight's gradient for those columns is one
matrix product over all tokens: no [V, D] accumulator, and the same rounding as with full logits.

Invariant the tests check: equal to full logits, values and gradients, for every chunk size and
number of ranks; nothing larger than a tile, the hidden states or the weight is ever allocated.
Cost against full logits: one more matrix product (4 instead of 3), far fewer passes over memory;
one all-gather of a few numbers a token.  Not covered: the gradient of a gradient.

Gradients in Megatron.  The weight's is complete on its rank and comes back in the weight's dtype;
DDP's hook adds it to `weight.main_grad` (`grad_added_to_main_grad` stays False).  The hidden
states' is only this rank's part of a sum: the caller puts the reduction in front, once, on the
whole sequence (chunks of sequence-parallel hidden states would gather the wrong tokens):
    without sequence parallelism
        hidden = copy_to_tensor_model_parallel_region(hidden)
    with sequence parallelism
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
Megatron's hidden states are [S, B, D]: pass hidden.flatten(0, 1) and labels.t().flatten().

Legend: T tokens, N tokens needed, D model, V the vocabulary columns of this rank, K statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.logprobs.inputs import check_inputs, check_labels
from megatron_ext.logprobs.partial_softmax import (
    block_statistics,
    empty_statistics,
    finish_statistics,
    logits_gradient_,
    merge_statistics,
)
from megatron_ext.logprobs.vocab_parallel import LogProbs, VocabShard, check_temperature

COLUMN_MULTIPLE = 64
"""Tiles are a multiple of this wide where they can be: matrix units want aligned rows."""


def selected_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    needed_T: Tensor | None = None,
    validate_labels: bool = True,
) -> LogProbs:
    """Log-probabilities of `labels_T` under softmax((hidden @ weight.T + bias) / temperature).

    Args:
        hidden_TD: [T, D], the same on all ranks of `tp_group`; see above for its gradient.
        weight_VD: [V, D], this rank's rows of the output layer, padding rows included.
        labels_T: integers [T], the global token id each position predicts.
        vocab_size: number of tokens; columns from here on are padding and take no part.
        tp_group: ranks that share the vocabulary, in its order; None = this rank has all of it.
        bias_V: [V], bias of the output layer.
        temperature: the sampler's; positive.
        chunk_size: a tile has at most the logits of this many tokens (but at least one column);
            0 = one tile.  Tiles alive: 1, with entropy 2, and half of one more for 16-bit inputs.
        with_entropy: also return the entropy; its gradient costs only where it is used.
        needed_T: bool [T], the same on all ranks of `tp_group`.  Other positions are not computed,
            have results and gradients 0 and any label.  None = all needed.  Waits for the GPU once.
        validate_labels: raise if a needed label is not in [0, vocab_size).  Waits for the GPU once;
            without it such a label makes its results and the weight's gradient NaN.

    Raises:
        ValueError: a shape, dtype, the temperature, vocab_size or a label is wrong.
    """
    check_temperature(temperature)
    check_inputs(
        hidden_TD, weight_VD, labels_T, bias_V=bias_V, needed_T=needed_T, chunk_size=chunk_size
    )
    shard = VocabShard.of(weight_VD.shape[0], vocab_size=vocab_size, tp_group=tp_group)
    num_tokens = len(labels_T)
    needed_N = None if needed_T is None else needed_T.nonzero().squeeze(1)
    if needed_N is not None:
        hidden_TD, labels_T = hidden_TD.index_select(0, needed_N), labels_T[needed_N]
    if validate_labels:
        check_labels(labels_T, vocab_size=vocab_size)
    limit = chunk_size * len(weight_VD)
    plan = _Plan(
        shard=shard,
        tiles=_tiles(shard.num_real, limit=limit, num_tokens=len(labels_T)),
        temperature=temperature,
        with_entropy=with_entropy,
    )
    found = LogProbs(*_FromHidden.apply(hidden_TD, weight_VD, bias_V, labels_T.long(), plan))
    return found if needed_N is None else _spread(found, needed_N, num_tokens=num_tokens)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What forward and backward must do alike."""

    shard: VocabShard
    tiles: list[slice]
    """This rank's real columns, cut into tiles."""
    temperature: float
    with_entropy: bool

    def logits(
        self, tile: slice, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None
    ) -> Tensor:
        """logits / temperature of a tile, rounded to the model's dtype, then at least float32."""
        if bias_V is None:
            logits_TV = torch.mm(hidden_TD, weight_VD[tile].t())
        else:
            logits_TV = torch.addmm(bias_V[tile], hidden_TD, weight_VD[tile].t())
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return logits_TV if self.temperature == 1.0 else logits_TV.div_(self.temperature)


class _FromHidden(torch.autograd.Function):
    """`selected_logprobs` after the checks, all positions needed: keeps inputs and statistics."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, bias_V, labels_T, plan):
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        stats_KT = empty_statistics(labels_T, dtype=dtype, with_entropy=plan.with_entropy)
        for tile in plan.tiles:
            tile_KT = block_statistics(
                plan.logits(tile, hidden_TD, weight_VD, bias_V),
                labels_T=labels_T,
                first_column=plan.shard.first_column + tile.start,
                with_entropy=plan.with_entropy,
            )
            stats_KT = merge_statistics(torch.stack([stats_KT, tile_KT]))
        stats_KT = plan.shard.merge_over_ranks(stats_KT, labels_T=labels_T)
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, labels_T, stats_KT)
        return finish_statistics(stats_KT)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads_T):
        hidden_TD, weight_VD, bias_V, labels_T, stats_KT = ctx.saved_tensors
        plan = ctx.plan
        grad_logprob_T, grad_entropy_T = (
            grad_T if grad_T is None else grad_T / plan.temperature for grad_T in grads_T
        )
        for_hidden, for_weight, for_bias, *_ = ctx.needs_input_grad
        grad_hidden_TD = torch.zeros_like(hidden_TD, dtype=stats_KT.dtype) if for_hidden else None
        grad_weight_VD = _zero_from(plan.shard.num_real, like=weight_VD) if for_weight else None
        grad_bias_V = _zero_from(plan.shard.num_real, like=bias_V) if for_bias else None
        for tile in plan.tiles:
            grad_TV = logits_gradient_(
                plan.logits(tile, hidden_TD, weight_VD, bias_V),
                labels_T=labels_T,
                first_column=plan.shard.first_column + tile.start,
                stats_KT=stats_KT,
                grad_logprob_T=grad_logprob_T,
                grad_entropy_T=grad_entropy_T,
            )
            if grad_bias_V is not None:
                grad_bias_V[tile] = grad_TV.sum(dim=0)
            grad_TV = grad_TV.to(weight_VD.dtype)
            if grad_weight_VD is not None:
                torch.mm(grad_TV.t(), hidden_TD, out=grad_weight_VD[tile])
            if grad_hidden_TD is not None:
                _add_product_(grad_hidden_TD, grad_TV, weight_VD[tile])
            del grad_TV  # or it would live beside the next tile
        if grad_hidden_TD is not None:
            grad_hidden_TD = grad_hidden_TD.to(hidden_TD.dtype)
        return grad_hidden_TD, grad_weight_VD, grad_bias_V, None, None


def _tiles(num_columns: int, *, limit: int, num_tokens: int) -> list[slice]:
    """Columns cut so that a tile of all tokens has at most `limit` logits; limit 0 = one tile."""
    width = num_columns
    if limit > 0 and num_tokens > 0:
        width = min(max(limit // num_tokens, 1), num_columns)
    if COLUMN_MULTIPLE < width < num_columns:
        width -= width % COLUMN_MULTIPLE
    starts = range(0, num_columns, max(width, 1))
    return [slice(start, min(start + width, num_columns)) for start in starts]


def _spread(found: LogProbs, needed_N: Tensor, *, num_tokens: int) -> LogProbs:
    """Results of the needed tokens in their places [T], 0 in between."""

    def spread(value_N: Tensor) -> Tensor:
        return value_N.new_zeros(num_tokens).index_copy(0, needed_N, value_N)

    entropy_N = found.entropy
    return LogProbs(spread(found.logprobs), None if entropy_N is None else spread(entropy_N))


def _zero_from(num_real: int, *, like: Tensor) -> Tensor:
    """Room for a gradient whose first `num_real` rows will be written; padding rows are 0."""
    grad = torch.empty_like(like)
    grad[num_real:] = 0
    return grad


def _add_product_(sum_TD: Tensor, grad_TV: Tensor, weight_VD: Tensor) -> None:
    """Add grad @ weight to a sum in at least float32: 16-bit tiles round, their sum does not."""
    if sum_TD.dtype == grad_TV.dtype:
        sum_TD.addmm_(grad_TV, weight_VD)
    else:
        sum_TD.add_(torch.mm(grad_TV, weight_VD))
