"""The gap between sampler and trainer, and which distributions cannot be trained on."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ext.rollout.agreement import LogprobGap, training_problems
from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.rollout.types import SamplingParams


def test_gap_counts_sampled_tokens_only_and_merges():
    sampler = torch.tensor([-1.0, -2.0, -3.0, 0.0])
    trainer = torch.tensor([-1.0, -2.5, -3.0, 9.0])
    sampled = torch.tensor([True, True, True, False])
    whole = LogprobGap.of(sampler, trainer, sampled_T=sampled)
    assert whole.metrics() == pytest.approx(
        {
            "logprob_gap_mean": 0.5 / 3,
            "logprob_gap_max": 0.5,
            "logprob_gap_kl": (math.exp(-0.5) - 1 + 0.5) / 3,
        }
    )
    parts = [
        LogprobGap.of(sampler[i : i + 2], trainer[i : i + 2], sampled_T=sampled[i : i + 2])
        for i in (0, 2)
    ]
    assert LogprobGap.merged(parts) == whole


def test_nothing_sampled_is_no_gap():
    nothing = LogprobGap.of(torch.zeros(2), torch.ones(2), sampled_T=torch.zeros(2).bool())
    assert nothing.metrics() == {
        "logprob_gap_mean": 0.0,
        "logprob_gap_max": 0.0,
        "logprob_gap_kl": 0.0,
    }
    assert LogprobGap.merged([]) == nothing


def test_cut_and_greedy_distributions_are_refused_with_the_reason():
    assert training_problems(RolloutConfig().sampling) == []
    assert training_problems(SamplingParams(temperature=0.7)) == []
    cut = training_problems(SamplingParams(top_k=5, top_p=0.9, min_p=0.1))
    assert [text.split(":")[0] for text in cut] == [
        "--rollout-top-k 5",
        "--rollout-top-p 0.9",
        "--rollout-min-p 0.1",
    ]
    assert all("cut off" in text for text in cut)
    assert "nothing to learn" in training_problems(SamplingParams(temperature=0))[0]


def test_config_names_every_bad_value():
    with pytest.raises(ValueError, match=r"--rollout-top-p 2.*--rollout-slots 0.*--rollout-cache"):
        RolloutConfig(rollout_top_p=2, rollout_slots=0, rollout_cache_tokens=-1)
