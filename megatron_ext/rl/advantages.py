"""From rewards to advantages: a baseline for each group, then a scale.

Invalid episodes take part in nothing and get 0.  Masked (valid, not trained) ones take part in the
baseline of their group; of the batch statistics only what is trained takes part.
Invariants the tests check: plain Python over each group; a constant group gets exactly 0, though
its mean rounds; whitening over ranks equals whitening of the whole batch.
Everything is in float64: in float32 the rounding of a mean, divided by a tiny standard deviation,
makes advantages of 0.05 out of nothing.

Legend: E episodes of this rank, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.rl.config import AdvantageNormalization, Baseline
from megatron_ext.rl.types import Episodes

ROUNDING = 1e-6
"""Spread, relative to the largest magnitude, below which values count as equal: what float32
rewards that are equal on paper may differ by."""


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """What each episode's group looks like, over its valid episodes."""

    mean_E: Tensor
    """Mean reward, float64; 0 without a valid episode."""
    std_E: Tensor
    """Sample standard deviation (n - 1) as in torch.std, float64; 0 below two valid episodes."""
    size_E: Tensor
    """Valid episodes, float64."""
    is_constant_E: Tensor
    """Whether their rewards are equal up to rounding (also for one or none), bool."""


def group_statistics(episodes: Episodes) -> GroupStatistics:
    """Mean, spread and size of every episode's group."""
    valid_E = episodes.is_valid_E
    reward_E = torch.where(valid_E, episodes.rewards_E.double(), 0)
    names, group_E = episodes.groups_E.unique(return_inverse=True)
    zeros_G = reward_E.new_zeros(len(names))

    def total(values_E: Tensor) -> Tensor:
        return zeros_G.index_add(0, group_E, values_E)

    def largest(values_E: Tensor) -> Tensor:
        lowest_G = torch.full_like(zeros_G, -torch.inf)
        kept_E = torch.where(valid_E, values_E, -torch.inf)
        return lowest_G.scatter_reduce(0, group_E, kept_E, "amax")

    size_G = total(valid_E.double())
    mean_G = total(reward_E) / size_G.clamp(min=1)
    deviation_E = torch.where(valid_E, reward_E - mean_G[group_E], 0)
    std_G = (total(deviation_E.square()) / (size_G - 1).clamp(min=1)).sqrt()
    spread_G = largest(reward_E) + largest(-reward_E)
    is_constant_G = spread_G <= ROUNDING * largest(reward_E.abs())
    return GroupStatistics(
        mean_E=mean_G[group_E],
        std_E=std_G[group_E],
        size_E=size_G[group_E],
        is_constant_E=is_constant_G[group_E],
    )


def advantages(
    episodes: Episodes,
    *,
    is_trained_E: Tensor,
    baseline: Baseline,
    normalization: AdvantageNormalization,
    data_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Advantage of each episode, float32 [E]; 0 where it is not trained.

    data_group: ranks that hold the other episodes of the global batch, for the normalization
    `batch` (then every rank calls this, also without an episode); None = this rank has all.
    """
    groups = group_statistics(episodes)
    value_E = episodes.rewards_E.double()
    if baseline != "none":
        value_E = torch.where(groups.is_constant_E, 0, value_E - groups.mean_E)
    if baseline == "leave-one-out":
        value_E = value_E * groups.size_E / (groups.size_E - 1).clamp(min=1)
    if normalization == "group-std":
        value_E = torch.where(groups.is_constant_E, 0, value_E / groups.std_E)
    is_used_E = is_trained_E & episodes.is_valid_E
    if normalization == "batch":
        weight_E = torch.where(is_used_E, episodes.num_tokens_E, 0)
        value_E = whiten(value_E, weights=weight_E, group=data_group)
    return torch.where(is_used_E, value_E, 0).float()


def whiten(values: Tensor, *, weights: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Values with mean 0 and population standard deviation 1, float64; 0 if all are equal.

    weights: how often each value counts; 0 = not at all (the value may be NaN, the result is 0).
    group: ranks whose values make one batch, each calling this, also with no values; None = alone.
    """
    weight, is_used = weights.double(), weights > 0
    value = torch.where(is_used, values.double(), 0)
    far = value.new_full((1,), -torch.inf)
    largest = [torch.cat([far, torch.where(is_used, v, -torch.inf)]).max() for v in (value, -value)]
    top, bottom = _reduced(torch.stack(largest), group, dist.ReduceOp.MAX)
    total, size = _reduced(torch.stack([(weight * value).sum(), weight.sum()]), group)
    deviation = torch.where(is_used, value - total / size, 0)
    (squares,) = _reduced((weight * deviation.square()).sum()[None], group)
    if top + bottom <= ROUNDING * max(abs(top), abs(bottom)):
        return torch.zeros_like(value)
    return deviation / (squares / size).sqrt()


def _reduced(
    values: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """The values combined over the ranks of a group; None = this rank's own."""
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
