"""Per-token policy losses, to be minimised; each one formula.

What they are averaged over is the loss law's (`packing/weights.py`), what they are computed from is
`objective.py`'s.  A ratio is p / p_old of a token or of its sequence (`ratios.py`).
Invariant the tests check: values and gradients of plain Python, for extreme ratios too.

Legend: T tokens; all tensors and results are [T], with any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor


def likelihood_loss(logp_T: Tensor, *, advantage_T: Tensor) -> Tensor:
    """REINFORCE (Williams 1992): -A log p."""
    return -advantage_T * logp_T


def importance_loss(ratio_T: Tensor, *, advantage_T: Tensor) -> Tensor:
    """Importance-sampled policy gradient ("LoRA Without Regret" 2025): -A p_learner / p_sampler."""
    return -advantage_T * ratio_T


def clipped_loss(
    ratio_T: Tensor, *, advantage_T: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0
) -> Tensor:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), each side with its own range.

    clip_low, clip_high: the ratio counts within [1 - clip_low, 1 + clip_high] (DAPO 2025, eq. 10).
    dual_clip: most loss per unit of negative advantage (Ye et al. 2020, eq. 5); 0 = no limit.
    """
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(-advantage_T * ratio_T, -advantage_T * clipped_T)
    # of a positive advantage the loss is negative, so this bounds only the other side
    return loss_T.minimum(advantage_T.abs() * dual_clip) if dual_clip else loss_T


def cispo_loss(
    logp_T: Tensor, ratio_T: Tensor, *, advantage_T: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Clipped importance weights on REINFORCE (CISPO, MiniMax-M1 2025, eq. 4): -A sg(w) log p.

    No token loses its gradient; w is the ratio within [1 - clip_low, 1 + clip_high].
    """
    return -advantage_T * ratio_T.detach().clamp(1 - clip_low, 1 + clip_high) * logp_T


def clip_fractions(
    ratio_T: Tensor, *, advantage_T: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0
) -> dict[str, Tensor]:
    """Where `clipped_loss` is clipped and so without gradient, 0 or 1 for each token."""
    is_bad_T = advantage_T < 0
    where = {
        "clip_fraction_low": is_bad_T & (ratio_T < 1 - clip_low),
        "clip_fraction_high": (advantage_T > 0) & (ratio_T > 1 + clip_high),
    }
    if dual_clip:
        where["clip_fraction_dual"] = is_bad_T & (ratio_T > dual_clip)
    return {name: clipped_T.to(ratio_T.dtype) for name, clipped_T in where.items()}


def weight_clip_fractions(
    ratio_T: Tensor, *, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """Where `cispo_loss` clips its weight, 0 or 1 for each token."""
    where = {
        "clip_fraction_low": ratio_T < 1 - clip_low,
        "clip_fraction_high": ratio_T > 1 + clip_high,
    }
    return {name: clipped_T.to(ratio_T.dtype) for name, clipped_T in where.items()}
