"""Probability ratios between two policies on the same tokens: of tokens and of whole sequences.

Log-ratios are clamped at 20, so that no ratio overflows; beyond, the gradient is 0.
Sequences are those of a packed row (`cu_seqlens`) or the rows of a padded microbatch.
Invariant the tests check: values and gradients of plain Python over each sequence alone.
Not covered: sequences split over context-parallel ranks (`sequence_mean` would need their sums).

Legend: T tokens (any shape), B rows, S positions of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.packing.types import Microbatch

LOG_RATIO_LIMIT = 20.0
"""Largest log-ratio, either way; e^20 is 4.9e8."""


def log_ratio(logp_T: Tensor, other_logp_T: Tensor) -> Tensor:
    """log p - log p_other of each token [T], within the limit."""
    return (logp_T - other_logp_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(
    logp_T: Tensor, other_logp_T: Tensor, *, trained_T: Tensor, sequence_T: Tensor
) -> Tensor:
    """Mean log-ratio over the trained tokens of each token's sequence [T] (GSPO 2025, eq. 7).

    The gradient is GSPO-token's (eq. 14): a token has the value of its sequence and the gradient of
    its own log-prob.  Where advantage and loss weight are constant over a sequence, summing over
    its tokens gives exactly the gradient of the sequence objective (eq. 10).
    trained_T: bool.  sequence_T: see `sequence_ids`.
    """
    difference_T = logp_T - other_logp_T
    mean_T = sequence_mean(difference_T.detach(), trained_T=trained_T, sequence_T=sequence_T)
    own_T = torch.where(mean_T.abs() <= LOG_RATIO_LIMIT, difference_T - difference_T.detach(), 0)
    return mean_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + own_T


def sequence_mean(values_T: Tensor, *, trained_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Mean of the values over the trained tokens of each token's own sequence [T]; 0 for none.

    Summed in float64, so the result does not depend on where in a row the sequence lies.
    """
    sequence = sequence_T.flatten()
    kept = torch.where(trained_T, values_T, 0).double().flatten()
    none = torch.zeros_like(kept)  # no more sequences than positions
    sums = none.index_add(0, sequence, kept)
    counts = none.index_add(0, sequence, trained_T.double().flatten())
    return (sums / counts.clamp(min=1))[sequence].to(values_T.dtype).view_as(values_T)


def sequence_ids(microbatch: Microbatch) -> Tensor:
    """Number of each position's sequence in its microbatch, int64 [B, S]."""
    tokens_BS, borders = microbatch.tokens_BS, microbatch.cu_seqlens
    if borders is None:
        rows = torch.arange(len(tokens_BS), device=tokens_BS.device)
        return rows[:, None].expand_as(tokens_BS)
    lengths = borders.diff()
    numbers = torch.arange(len(lengths), device=lengths.device)
    row = torch.repeat_interleave(numbers, lengths, output_size=tokens_BS.shape[1])
    return row.view_as(tokens_BS)


def sampler_weight(log_ratio_T: Tensor, *, cap: float) -> Tensor:
    """min(p_old / p_sampler, cap) [T], a constant: what corrects for tokens another policy drew.

    cap: inf = the weight of decoupled PPO (AReaL 2025, eq. 5); finite = truncated importance
    sampling, for the gap between a sampler and a trainer of the same weights (Yao et al. 2025).
    log_ratio_T: log p_old - log p_sampler of tokens, or of sequences where the loss has the ratio
    of sequences.  That ratio r depends on all n tokens: with weights w_t of tokens, the loss would
    have the gradient mean(w) f'(r) r / n, and token t would get w_t f'(r) r / n.  Equal weights in
    a sequence make them one, and r w is the sequence's ratio to the sampler below the cap.
    """
    return log_ratio_T.exp().clamp(max=cap).detach()
