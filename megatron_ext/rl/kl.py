"""Estimators of the KL divergence from the policy to a reference, from sampled tokens.

The idea (Schulman 2020, "Approximating KL divergence"): with x sampled from the policy and
d = log p_reference(x) - log p_policy(x),

    k1 = -d             unbiased, high variance, negative at times
    k2 = d^2 / 2        biased, low variance; its gradient is that of the KL divergence
    k3 = e^d - 1 - d    unbiased, never negative

As a loss: the expected gradient of k1 is 0 whatever the reference is, so `AlgorithmConfig.problems`
refuses it there.  Invariant the tests check: values and gradients of plain Python.
Legend: T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.rl.config import KlEstimator
from megatron_ext.rl.ratios import log_ratio


def kl_estimate(logp_T: Tensor, reference_logp_T: Tensor, *, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) [T], differentiable in `logp_T`."""
    difference_T = log_ratio(reference_logp_T, logp_T)
    match estimator:
        case "k1":
            return -difference_T
        case "k2":
            return difference_T.square() / 2
        case "k3":
            return torch.expm1(difference_T) - difference_T
