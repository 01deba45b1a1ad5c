"""Every metric that an option promises is logged in every combination of options, and no other."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_ext.environments.episode import Episode
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.learning import learn
from megatron_ext.rl.phases import Phases
from megatron_ext.rl.presets import PRESETS
from megatron_ext.rl.rollouts import play, step_starts
from megatron_ext.rl.scoring import score_episodes
from megatron_ext.rl.step_metrics import learning_metrics
from tests.rl.test_advantages import episodes
from tests.rl.toy_policy import ToyPolicy, loop_of

ROLLED_OUT = {
    *("episodes", "invalid_share", "environment_warnings", "turns_mean", "truncated_share"),
    *("reward_mean", "reward_std", "pass_rate", "response_tokens_passed", "response_tokens_failed"),
    *(f"response_tokens_{name}" for name in ("min", "median", "p90", "max")),
    *("rollout_seconds", "sync_seconds", "reward_seconds", "rollout_tokens_per_second"),
}
LEARNED = {
    *("trained_episodes", "masked_episodes", "dropped_episodes", "zero_variance_group_share"),
    *("zero_advantage_share", "advantage_abs_mean", "updates", "tokens", "trained_tokens"),
    *("loss", "grad_norm", "lr", "skipped_updates", "padding_share"),
    *("ratio", "ratio_squared", "ratio_deviation", "kl_old", "sampler_gap", "sampler_kl"),
    *("entropy_estimate", "seconds", "train_seconds", "train_tokens_per_second"),
}
CLIPPED = {"clip_fraction_low", "clip_fraction_high"}
WITHOUT_CLIP = ("reinforce", "rloo", "importance-sampling")
CHANGES: dict[str, tuple[dict, set[str]]] = {
    "as it is": ({}, set()),
    "KL in the loss": (
        {"kl_coefficient": 0.1, "kl_placement": "loss"},
        {"kl_reference", "logprobs_seconds", "logprobs_tokens_per_second"},
    ),
    "KL in the reward": (
        {"kl_coefficient": 0.1, "kl_placement": "reward"},
        {"kl_reference", "shaped_reward_mean", "logprobs_seconds"},
    ),
    "no KL": ({"kl_coefficient": 0.0}, set()),
    "entropy": ({"entropy_coefficient": 0.1}, {"entropy"}),
    "correction": (
        {"sampler_correction_cap": 1.5, "old_policy": "trainer"},
        {"sampler_weight", "sampler_weight_capped"},
    ),
    "penalty": ({"overlong_penalty": 0.5}, {"shaped_reward_mean"}),
    "nothing shaped": (
        {"overlong_penalty": 0.0, "kl_coefficient": 0.0, "sampler_correction_cap": 0.0},
        set(),
    ),
}


def algorithm_of(name: str, **changes) -> AlgorithmConfig:
    """The preset with changes; cut episodes are trained, as most of the toy's are cut."""
    values = {k: v for k, v in PRESETS[name].items() if k != "loss_normalization"}
    values["overlong_episodes"] = "train"
    return AlgorithmConfig(algorithm=name, **{**values, **changes})


def of_the_preset(config: AlgorithmConfig) -> set[str]:
    """What the preset's own options promise."""
    found = set() if config.algorithm in WITHOUT_CLIP else set(CLIPPED)
    if config.algorithm == "ppo":
        found.add("clip_fraction_dual")
    if config.sampler_correction_cap:
        found |= {"sampler_weight", "sampler_weight_capped"}
    if config.kl_coefficient:
        found |= {"kl_reference", "logprobs_seconds"}
        if config.kl_placement == "loss":
            found.add("logprobs_tokens_per_second")
    if config.overlong_penalty:
        found.add("shaped_reward_mean")
    return found


@cache
def played() -> list[Episode]:
    """The episodes of a step."""
    loop, policy = loop_of(ToyPolicy()), ToyPolicy()
    starts = step_starts(loop.source, first_group=0, num_groups=4, group_size=4, seed=0)
    return play(policy, loop.runner, starts, version=0, phases=Phases())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PRESETS)
def test_b10_every_promised_metric_is_logged(name, change):
    changes, promised = CHANGES[change]
    config, phases = algorithm_of(name, **changes), Phases()
    loop = loop_of(ToyPolicy(), algorithm=config)
    learned = learn(
        loop.policy,
        played(),
        algorithm=config,
        loop=loop.config,
        planner=loop.planner,
        max_response_tokens=4,
        phases=phases,
    )
    found = {**learning_metrics(learned), **phases.metrics()}
    assert set(found) == LEARNED | of_the_preset(config) | promised


def test_b10_a_step_logs_what_was_rolled_out_too():
    config = algorithm_of("rloo", kl_coefficient=0.1, kl_placement="reward", overlong_penalty=0.5)
    found = loop_of(ToyPolicy(), algorithm=config).step(1, consumed=0)
    assert set(found) == ROLLED_OUT | LEARNED | of_the_preset(config)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_b10_the_kl_of_both_placements_is_one_number(estimator):
    """Of the trained tokens, before the first update."""
    policies = {place: ToyPolicy() for place in ("loss", "reward")}
    found = {}
    for place, policy in policies.items():
        config = algorithm_of(
            "dr-grpo", kl_coefficient=0.1, kl_placement=place, kl_estimator=estimator
        )
        found[place] = loop_of(policy, algorithm=config).step(1, consumed=0)["kl_reference"]
    # the toy's log-probs are -3 and the reference's -3.5
    want = 0.125 if estimator == "k2" else torch.tensor(-0.5).expm1().item() + 0.5
    assert found == {"loss": pytest.approx(want), "reward": pytest.approx(want)}


def test_b10_the_kl_in_the_reward_is_a_mean_over_trained_tokens():
    config = AlgorithmConfig(
        algorithm="rloo", kl_coefficient=0.5, kl_placement="reward", overlong_episodes="mask"
    )
    outcome = episodes(
        [1.0, 0.0, 1.0, float("nan")],
        valid=[1, 1, 1, 0],
        truncated=[0, 0, 1, 0],
        tokens=[2, 6, 3, 9],
    )
    kl_E = torch.tensor([1.0, 3.0, 50.0, 0.0], dtype=torch.float64)
    found = score_episodes(outcome, config, max_response_tokens=20, kl_E=kl_E)
    assert found.shaping == {
        "kl_reference": 4 / 8,
        "shaped_reward_mean": pytest.approx((0.5 - 1.5 - 24.0) / 3),
    }
    plain = score_episodes(outcome, replace(config, kl_coefficient=0.0), max_response_tokens=20)
    assert plain.shaping == {}
    nothing = episodes([float("nan")], valid=[0])
    none = score_episodes(nothing, config, max_response_tokens=20, kl_E=kl_E[-1:])
    assert none.shaping == {}
