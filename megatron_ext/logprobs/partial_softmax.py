"""Softmax statistics of some vocabulary columns, and how those of disjoint columns merge.

The idea: a label's log-probability and the entropy need four numbers a token from a set of columns;
the numbers of disjoint sets merge exactly.  So a block of columns (which bounds the memory) and a
tensor-parallel rank (which holds some columns) are the same thing.

Legend: T tokens, V columns of one set, P disjoint sets, K the statistics, in this order:
    max       largest logit
    sumexp    sum of exp(logit - max)
    label     logit of the label - max; -inf where the label is not in the set
    weighted  sum of exp(logit - max) * (logit - max); only when the entropy is wanted
All but the first are relative to the max, so that logits of 1e4 lose nothing in float32.

Invariant the tests check: any cut into sets, merged in any order, equals `log_softmax` over all
columns, values and gradients.  Not covered: infinite logits (their entropy is NaN).
"""

from __future__ import annotations

import torch
from torch import Tensor


def empty_statistics(labels_T: Tensor, *, dtype: torch.dtype, with_entropy: bool) -> Tensor:
    """Statistics [K, T] of no column at all: the neutral element of `merge_statistics`."""
    rows = [-torch.inf, 0.0, -torch.inf] + [0.0] * with_entropy
    return torch.tensor(rows, dtype=dtype, device=labels_T.device)[:, None].repeat(1, len(labels_T))


def block_statistics(
    logits_TV: Tensor, *, labels_T: Tensor, first_column: int, with_entropy: bool
) -> Tensor:
    """Statistics [K, T] of columns first_column, first_column + 1, ...  Overwrites `logits_TV`.

    Labels count global columns, like `first_column`; V must be at least 1.
    """
    max_T = logits_TV.amax(dim=1)
    logits_TV.sub_(max_T[:, None])
    index_T, is_here_T = _column_of_label(logits_TV, labels_T=labels_T, first_column=first_column)
    label_T = logits_TV.gather(1, index_T[:, None]).squeeze(1).masked_fill(~is_here_T, -torch.inf)
    if not with_entropy:
        return torch.stack([max_T, logits_TV.exp_().sum(dim=1), label_T])
    exp_TV = logits_TV.exp()
    return torch.stack([max_T, exp_TV.sum(dim=1), label_T, exp_TV.mul_(logits_TV).sum(dim=1)])


def merge_statistics(stats_PKT: Tensor) -> Tensor:
    """Statistics [K, T] of the union of P disjoint sets of columns."""
    max_PT, sumexp_PT, label_PT, *weighted_PT = stats_PKT.unbind(dim=1)
    max_T = max_PT.amax(dim=0)
    # The clamp keeps the union of empty sets empty: -inf - -inf would be NaN.
    shift_PT = max_PT - max_T.clamp(min=torch.finfo(max_T.dtype).min)
    scale_PT = shift_PT.exp()
    mass_PT = scale_PT * sumexp_PT
    merged = [max_T, mass_PT.sum(dim=0), (label_PT + shift_PT).amax(dim=0)]
    for part_PT in weighted_PT:
        moved_PT = torch.where(mass_PT > 0, mass_PT * shift_PT, 0)
        merged.append((scale_PT * part_PT + moved_PT).sum(dim=0))
    return torch.stack(merged)


def finish_statistics(stats_KT: Tensor) -> tuple[Tensor, Tensor | None]:
    """Log-probability of the label [T], and entropy [T] in nats if the statistics have it."""
    _, sumexp_T, label_T, *weighted_T = stats_KT.unbind(dim=0)
    log_sumexp_T = sumexp_T.log()
    entropy_T = log_sumexp_T - weighted_T[0] / sumexp_T if weighted_T else None
    return label_T - log_sumexp_T, entropy_T


def logits_gradient_(
    logits_TV: Tensor,
    *,
    labels_T: Tensor,
    first_column: int,
    stats_KT: Tensor,
    grad_logprob_T: Tensor | None,
    grad_entropy_T: Tensor | None,
) -> Tensor:
    """Overwrite the logits of a block by their gradient; `stats_KT` is of all columns.

    With p the softmax, d logprob / d logit = [is the label] - p, d entropy / d logit = -p (log p +
    entropy).  An upstream gradient that is None counts as 0 and costs nothing.
    """
    max_T, sumexp_T = stats_KT[0], stats_KT[1]
    logits_TV.sub_(max_T[:, None])
    offset_T = torch.zeros_like(max_T) if grad_logprob_T is None else -grad_logprob_T / sumexp_T
    if grad_entropy_T is None:
        logits_TV.exp_().mul_(offset_T[:, None])
    else:
        _, entropy_T = finish_statistics(stats_KT)
        assert entropy_T is not None, "an entropy gradient needs statistics with entropy"
        slope_T = -grad_entropy_T / sumexp_T
        offset_T = offset_T + slope_T * (entropy_T - sumexp_T.log())
        factor_TV = torch.addcmul(offset_T[:, None], logits_TV, slope_T[:, None])
        logits_TV.exp_().mul_(factor_TV)
    if grad_logprob_T is not None:
        index_T, is_here_T = _column_of_label(
            logits_TV, labels_T=labels_T, first_column=first_column
        )
        rows_T = torch.arange(len(labels_T), device=labels_T.device)
        logits_TV[rows_T, index_T] += torch.where(is_here_T, grad_logprob_T, 0)
    return logits_TV


def _column_of_label(
    logits_TV: Tensor, *, labels_T: Tensor, first_column: int
) -> tuple[Tensor, Tensor]:
    """Each label's column in the block (any column if it is elsewhere), and whether it is here."""
    index_T = labels_T - first_column
    is_here_T = (index_T >= 0) & (index_T < logits_TV.shape[1])
    return index_T.clamp(0, logits_TV.shape[1] - 1), is_here_T
