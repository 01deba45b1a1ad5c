"""Shaping, selection and advantages together, in the order that the algorithms mean."""

from dataclasses import replace

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


def test_c7_filters_look_at_raw_rewards():
    """DAPO, eq. 11: a group is kept where some but not all of its answers are right."""
    config = AlgorithmConfig(
        algorithm="dapo",
        overlong_penalty=1.0,
        overlong_penalty_window=4,
        zero_variance_groups="drop",
        advantage_normalization="group-std",
    )
    found = score_episodes(
        episodes([0.0, 0.0, 1.0, 0.0], groups=[3, 3, 8, 8], tokens=[17, 18, 18, 16]),
        config,
        max_response_tokens=20,
    )
    assert found.rewards_E.tolist() == [-0.25, -0.5, 0.5, 0.0]
    assert found.is_trained_E.tolist() == [False, False, True, True]
    assert found.advantages_E.tolist() == pytest.approx([0, 0, 0.5**0.5, -(0.5**0.5)])
    assert found.counts["zero_variance_dropped"] == 2
    assert found.counts["zero_variance_groups"] == 1


@pytest.mark.parametrize("shaping", ["overlong", "kl", "both"])
@pytest.mark.parametrize("drops", ["drop", "train"])
def test_c7_shaping_changes_advantages_but_no_filter(shaping, drops):
    """A flat group that is kept feels the shaping; one that shaping makes flat is kept."""
    plain = AlgorithmConfig(algorithm="dapo", zero_variance_groups=drops)
    kl = {"kl_coefficient": 0.5, "kl_placement": "reward"} if shaping != "overlong" else {}
    penalty = {"overlong_penalty": 0.5, "overlong_penalty_window": 4} if shaping != "kl" else {}
    groups, tokens = [0, 0, 1, 1, 2, 2], [16, 20, 16, 20, 20, 20]
    outcome = episodes([1.0, 1.0, 0.0, 0.5, 0.0, 0.0], groups=groups, tokens=tokens)
    kl_E = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    found = score_episodes(
        outcome, replace(plain, **kl, **penalty), max_response_tokens=20, kl_E=kl_E
    )
    raw = score_episodes(outcome, plain, max_response_tokens=20)
    assert found.is_trained_E.tolist() == raw.is_trained_E.tolist()
    assert found.counts == raw.counts
    assert found.counts["zero_variance_groups"] == 2
    kept = drops == "train"
    assert (found.advantages_E[:2] != 0).tolist() == [kept, kept]
    assert found.advantages_E[4:].tolist() == [0, 0]


def test_kl_in_the_reward_comes_before_the_baseline():
    config = AlgorithmConfig(algorithm="rloo", kl_coefficient=0.1, kl_placement="reward")
    outcome = episodes([1.0, 0.0])
    kl = torch.tensor([2.0, 4.0], dtype=torch.float64)
    found = score_episodes(outcome, config, max_response_tokens=20, kl_E=kl)
    assert found.rewards_E.tolist() == pytest.approx([0.8, -0.4])
    assert found.advantages_E.tolist() == pytest.approx([0.6, -0.6])
    with pytest.raises(AssertionError, match="--kl-placement reward needs the KL"):
        score_episodes(outcome, config, max_response_tokens=20)
