"""What the reinforcement-learning room passes around: episodes, extras of a microbatch, loss terms.

Legend: E episodes, B rows, S positions of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ADVANTAGES = "advantages"
"""Extra of a sample: advantage of each token."""
SAMPLER_LOGPROBS = "sampler_logprobs"
"""Extra: log-probs that the sampler recorded while generating (the behaviour policy)."""
OLD_LOGPROBS = "old_logprobs"
"""Extra: the trainer's log-probs before the first update of a rollout batch (the proximal policy),
the same in all its updates."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""Extra: log-probs of the reference policy of the KL term."""


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What an objective computes for one microbatch; anything at all where the weight is 0."""

    losses_BS: Tensor
    """Per-token losses [B, S], to be minimised; with a graph."""
    statistics: Mapping[str, Tensor]
    """Per-token values [B, S] without a graph.  A statistic is the mean over the trained tokens of
    a step: sum it over trained positions, microbatches and ranks, divide by their number."""


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """What advantages and filters need to know of the episodes on a rank, one entry for each.

    All episodes of a group are on one rank.
    """

    rewards_E: Tensor
    """Reward, any float; any value (NaN too) where the episode is invalid."""
    groups_E: Tensor
    """Group (prompt), an integer; equal = same group."""
    is_valid_E: Tensor
    """False where there is no usable reward (the environment or the reward failed), bool."""
    is_truncated_E: Tensor
    """True where the episode ended at its length limit, bool."""
    num_tokens_E: Tensor
    """Trained tokens (those the policy sampled), an integer."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for columns of different lengths and for valid rewards that are not
        finite."""
        columns = vars(self)
        expected = self.rewards_E.shape
        wrong = [f"{name} {list(c.shape)}" for name, c in columns.items() if c.shape != expected]
        if wrong or len(expected) != 1:
            raise ValueError(
                f"{', '.join(wrong) or 'rewards_E'} must be [E], one entry per episode, as "
                f"rewards_E {list(expected)}."
            )
        bad = (self.is_valid_E & ~torch.isfinite(self.rewards_E)).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"rewards of episodes {bad[:8]} are not finite: return a number, or mark the "
                "episode invalid to leave it out."
            )
