"""What the loop asks of a policy, and that bad environments cost themselves only."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from megatron_ext.environments.base import Observation
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.watch import MOST_IDLE_STEPS, NothingToTrain
from tests.rl.toy_policy import CONTEXT, OddTokens, ToyPolicy, loop_of

DROP = AlgorithmConfig(algorithm="grpo-plus", zero_variance_groups="drop")
WITH_KL = AlgorithmConfig(algorithm="grpo", kl_coefficient=0.1)


class Raises(OddTokens):
    """Fails to grade one place in two."""

    def reset(self, task, *, seed):
        self.place = int(task.id)
        return super().reset(task, seed=seed)

    def step(self, sampled):
        if self.place % 2:
            raise KeyError("the grader has a defect")
        return super().step(sampled)


class Hangs(Raises):
    """Never grades one place in two."""

    is_instant = False
    never = threading.Event()

    def step(self, sampled):
        while self.place % 4 == 1 and not self.never.is_set():
            self.never.wait(0.01)
        return OddTokens.step(self, sampled)


class Exits(Raises):
    """Asks one time in two for the end of the process."""

    def step(self, sampled):
        if self.place % 2:
            os._exit(3) if self.place % 4 == 1 else sys.exit(3)
        return OddTokens.step(self, sampled)


class OutOfVocabulary(Raises):
    """One place in two answers ids that are none."""

    def step(self, sampled):
        if self.place % 2:
            return Observation(ids=[99999] if self.place % 4 == 1 else [1.5])  # type: ignore[list-item]
        return OddTokens.step(self, sampled)


class TooLong(OddTokens):
    """One prompt in four fills the context."""

    def reset(self, task, *, seed):
        return [1] * CONTEXT if int(task.id) % 4 == 0 else super().reset(task, seed=seed)


class Constant(OddTokens):
    """Rewards say nothing."""

    def step(self, sampled):
        return Observation(reward=1.0, done=True)


class NotFinite(OddTokens):
    """Rewards are no numbers."""

    def step(self, sampled):
        return Observation(reward=float("nan"), done=True)


def test_a_step_trains_its_episodes_once():
    policy = ToyPolicy()
    found = loop_of(policy).step(1, consumed=0)
    assert policy.calls == ["train"]  # on policy, nothing else has to be computed
    assert policy.moved == found["episodes"] == found["trained_episodes"] == 16
    assert 0 < found["pass_rate"] < 1
    assert len(policy.advantages()) > 1
    tokens = sum(int((m.weights_BS != 0).sum()) for m in policy.trained[0])
    assert found["trained_tokens"] == tokens
    assert found["rollout_tokens_per_second"] > 0
    assert found["reward_seconds"] > 0


def test_several_updates_have_old_logprobs_of_before_the_first():
    policy = ToyPolicy()
    found = loop_of(policy, batch_epochs=2, minibatches=3).step(1, consumed=0)
    assert policy.calls == ["logprobs"] * 3 + ["train"] * 6
    assert policy.moved == 16
    for first, second in zip(policy.trained[:3], policy.trained[3:], strict=True):
        assert all(a is b for a, b in zip(first, second, strict=True))
    assert found["updates"] == 6


def test_a_reference_is_asked_only_where_it_counts():
    policy = ToyPolicy()
    assert loop_of(policy, algorithm=WITH_KL).step(1, consumed=0)
    assert policy.calls == ["reference", "train"]
    policy = ToyPolicy()
    in_reward = AlgorithmConfig(algorithm="rloo", kl_coefficient=0.1, kl_placement="reward")
    assert loop_of(policy, algorithm=in_reward).step(1, consumed=0)
    assert policy.calls == ["logprobs", "reference", "train"]


def test_a_step_depends_on_its_place_only():
    first, second = ToyPolicy(), ToyPolicy()
    loop = loop_of(first, algorithm=WITH_KL)
    loop.step(1, consumed=0)
    loop.step(2, consumed=16)
    loop_of(second, algorithm=WITH_KL).step(2, consumed=16)
    mine, theirs = first.trained[1], second.trained[0]
    assert [m.tokens_BS.tolist() for m in mine] == [m.tokens_BS.tolist() for m in theirs]


@pytest.mark.parametrize(
    ("environment", "share"),
    [(Raises, 0.5), (Hangs, 0.25), (TooLong, 0.25), (Exits, 0.5), (OutOfVocabulary, 0.5)],
)
def test_a_bad_environment_costs_its_own_episodes(environment, share, caplog):
    policy = ToyPolicy()
    found = loop_of(policy, environment=environment, time_limit=0.2).step(1, consumed=0)
    assert found["invalid_share"] == share
    assert found["trained_episodes"] == 16 * (1 - share)
    assert policy.moved == 16
    assert "failed and count for nothing" in caplog.text


@pytest.mark.parametrize(
    ("environment", "algorithm", "reason"),
    [
        (Constant, DROP, "in 4 of 4 groups"),
        (Constant, AlgorithmConfig(algorithm="grpo-plus"), "in 4 of 4 groups"),
        (NotFinite, DROP, "16 failed"),
    ],
)
def test_a_run_without_anything_to_train_ends(environment, algorithm, reason, caplog):
    policy = ToyPolicy()
    loop = loop_of(policy, environment=environment, algorithm=algorithm)
    for step in range(1, MOST_IDLE_STEPS + 1):
        loop.watch.end_if_idle()
        found = loop.step(step, consumed=16 * (step - 1))  # the fifth is there to be recorded
        assert found["updates"] == found["trained_tokens"] == 0
        assert "loss" not in found
    with pytest.raises(NothingToTrain, match=reason):
        loop.watch.end_if_idle()
    assert policy.calls == ["skip"] * MOST_IDLE_STEPS
    assert policy.moved == 16 * MOST_IDLE_STEPS  # the learning rate moves on


def test_c7_a_step_drops_flat_groups_of_different_lengths():
    """Every reward is 1, and the penalty for length differs."""
    config = AlgorithmConfig(
        algorithm="dapo",
        zero_variance_groups="drop",
        overlong_penalty=1.0,
        overlong_penalty_window=4,
    )
    policy = ToyPolicy()
    found = loop_of(policy, environment=Constant, algorithm=config).step(1, consumed=0)
    assert policy.calls == ["skip"]
    assert found["response_tokens_min"] < found["response_tokens_max"]
    assert found["reward_mean"] == 1 > found["shaped_reward_mean"]
    assert found["dropped_episodes"] == 16 and found["zero_variance_group_share"] == 1


def test_flat_groups_are_trained_where_another_term_pulls(caplog):
    policy = ToyPolicy()
    found = loop_of(policy, environment=Constant, algorithm=WITH_KL).step(1, consumed=0)
    assert policy.calls == ["reference", "train"]
    assert found["zero_advantage_share"] == 1
