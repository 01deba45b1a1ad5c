"""Shaping, selection and advantages together, in the order that the algorithms mean."""

import pytest
import torch

from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.scoring import score_episodes
from tests.rl.test_advantages import episodes

NAN = float("nan")


def test_grpo_plus_masks_truncated_episodes_but_keeps_them_in_the_baseline():
    config = AlgorithmConfig(algorithm="grpo-plus", overlong_episodes="mask")
    found = score_episodes(
        episodes([1.0, 0.0, 0.25, NAN], valid=[1, 1, 1, 0], truncated=[0, 0, 1, 1]),
        config,
        max_response_tokens=20,
    )
    assert found.is_trained_E.tolist() == [True, True, False, False]
    assert found.advantages_E.tolist() == pytest.approx([7 / 12, -5 / 12, 0, 0])
    assert found.counts["overlong_masked"] == 1 and found.counts["invalid"] == 1


def test_dapo_judges_groups_by_their_shaped_rewards():
    config = AlgorithmConfig(algorithm="dapo", overlong_penalty=0.5, zero_variance_groups="drop")
    found = score_episodes(
        episodes([0.0, 0.0, 1.0, 1.0], groups=[3, 3, 8, 8], tokens=[18, 16, 5, 9]),
        config,
        max_response_tokens=20,
    )
    assert found.rewards_E.tolist() == [-0.25, 0.0, 1.0, 1.0]
    assert found.advantages_E.tolist() == [-0.125, 0.125, 0.0, 0.0]
    assert found.is_trained_E.tolist() == [True, True, False, False]
    assert found.counts["zero_variance_dropped"] == 2


def test_kl_in_the_reward_comes_before_the_baseline():
    config = AlgorithmConfig(algorithm="rloo", kl_coefficient=0.1, kl_placement="reward")
    outcome = episodes([1.0, 0.0])
    kl = torch.tensor([2.0, 4.0], dtype=torch.float64)
    found = score_episodes(outcome, config, max_response_tokens=20, kl_E=kl)
    assert found.rewards_E.tolist() == pytest.approx([0.8, -0.4])
    assert found.advantages_E.tolist() == pytest.approx([0.6, -0.6])
    with pytest.raises(AssertionError, match="--kl-placement reward needs the KL"):
        score_episodes(outcome, config, max_response_tokens=20)
