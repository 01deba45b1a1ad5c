"""What is subtracted from an episode's reward before its group's baseline is formed.

Invariant the tests check: the values of plain Python.
Legend: E episodes, n tokens of one episode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.rl.config import KlEstimator
from megatron_ext.rl.kl import kl_estimate


def overlong_penalty(num_tokens_E: Tensor, *, max_length: int, window: int) -> Tensor:
    """Soft penalty for long responses (DAPO 2025, eq. 13): a number in [-1, 0] for each, float64.

    0 up to max_length - window tokens, then linear to -1 at max_length and beyond.
    """
    if not 0 < window <= max_length:
        raise ValueError(
            f"--overlong-penalty-window {window} must lie between 1 and the longest response, "
            f"{max_length} tokens."
        )
    excess_E = num_tokens_E.double() - (max_length - window)
    return -(excess_E / window).clamp(0, 1)


def episode_kl(
    logp_n: Tensor, reference_logp_n: Tensor, *, mask_n: Tensor, estimator: KlEstimator
) -> Tensor:
    """Estimate of the KL divergence of one episode: the sum over its trained tokens, float64.

    Subtract it from the episode's reward times --kl-coefficient (RLOO 2024, eq. 3).
    """
    with torch.no_grad():
        terms_n = kl_estimate(logp_n.double(), reference_logp_n.double(), estimator=estimator)
        return torch.where(mask_n != 0, terms_n, 0).sum()
