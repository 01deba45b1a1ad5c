"""From the outcomes of a step's episodes to what is trained with which advantage.

Idea: select the episodes by the rewards as they were earned, shape the rewards (overlong penalty,
KL), then form the advantages.  Filters and counts never see the shaping: a group whose answers are
all right or all wrong says nothing, whatever lengths and KL add (DAPO 2025, eq. 11).  Masked
episodes count in their group's baseline.
Invariant the tests check: the parts applied by hand.

Legend: E episodes of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from megatron_ext.rl.advantages import advantages
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.filters import select_episodes
from megatron_ext.rl.reward_shaping import overlong_penalty
from megatron_ext.rl.types import Episodes


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What the update needs of each episode."""

    advantages_E: Tensor
    """Advantage of every token of the episode, float32; 0 where it is not trained."""
    is_trained_E: Tensor
    """Which episodes to pack, bool; the others stay out of N."""
    rewards_E: Tensor
    """Rewards after shaping, float64."""
    counts: dict[str, int]
    """See `select_episodes`; to be added over ranks."""
    shaping: dict[str, float]
    """Metrics of what shaping did, of the options that are on; empty without a shaped episode."""


def score_episodes(
    episodes: Episodes,
    config: AlgorithmConfig,
    *,
    max_response_tokens: int,
    kl_E: Tensor | None = None,
    data_group: dist.ProcessGroup | None = None,
) -> Scored:
    """Advantages of this rank's episodes; collective if advantages are normalised by the batch.

    kl_E: KL divergence of each episode to the reference (`episode_kl`), where the config puts it in
    the reward.  data_group: the data-parallel ranks; None = this rank has the whole batch.
    """
    rewards_E = episodes.rewards_E.double()
    if config.overlong_penalty:
        window = config.penalty_window(max_response_tokens=max_response_tokens)
        rewards_E = rewards_E + config.overlong_penalty * overlong_penalty(
            episodes.num_tokens_E, max_length=max_response_tokens, window=window
        )
    if config.has_kl_reward:
        assert kl_E is not None, "--kl-placement reward needs the KL of each episode"
        rewards_E = rewards_E - config.kl_coefficient * kl_E
    selection = select_episodes(
        episodes,
        overlong_episodes=config.overlong_episodes,
        zero_variance_groups=config.zero_variance_groups,
    )
    return Scored(
        advantages_E=advantages(
            replace(episodes, rewards_E=rewards_E),
            is_trained_E=selection.is_trained_E,
            baseline=config.advantage_baseline,
            normalization=config.advantage_normalization,
            data_group=data_group,
        ),
        is_trained_E=selection.is_trained_E,
        rewards_E=rewards_E,
        counts=selection.counts,
        shaping=_shaping(
            episodes, config, rewards_E=rewards_E, kl_E=kl_E, is_trained_E=selection.is_trained_E
        ),
    )


def _shaping(
    episodes: Episodes,
    config: AlgorithmConfig,
    *,
    rewards_E: Tensor,
    kl_E: Tensor | None,
    is_trained_E: Tensor,
) -> dict[str, float]:
    """Mean shaped reward of the valid episodes; KL per trained token, as --kl-placement loss has it
    in the first update."""
    found: dict[str, float] = {}
    valid_E = episodes.is_valid_E
    if (config.overlong_penalty or config.has_kl_reward) and valid_E.any():
        found["shaped_reward_mean"] = float(rewards_E[valid_E].mean())
    if config.has_kl_reward and kl_E is not None and is_trained_E.any():
        num_tokens = episodes.num_tokens_E[is_trained_E].sum().clamp(min=1)
        found["kl_reference"] = float(kl_E[is_trained_E].sum() / num_tokens)
    return found
