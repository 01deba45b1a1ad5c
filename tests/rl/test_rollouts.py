"""Which episodes a step has, and the control without a signal."""

from dataclasses import replace

from megatron_ext.environments.arithmetic import ArithmeticSource
from megatron_ext.environments.arithmetic_demonstrations import demonstrate
from megatron_ext.rl.rollouts import step_starts, with_shuffled_rewards

SOURCE = ArithmeticSource(seed=1)


def starts(first_group, num_groups=3):
    return step_starts(SOURCE, first_group=first_group, num_groups=num_groups, group_size=4, seed=5)


def test_a_group_has_one_task_and_seed_and_different_samples():
    found = starts(6)
    assert [s.group for s in found] == [6] * 4 + [7] * 4 + [8] * 4
    assert [s.sample for s in found] == [0, 1, 2, 3] * 3
    for group in (6, 7, 8):
        members = [s for s in found if s.group == group]
        assert {s.task for s in members} == {SOURCE.train(group)}
        assert len({s.seed for s in members}) == 1
    assert len({s.seed for s in found}) == 3


def test_steps_depend_on_their_place_only():
    assert starts(0, 6) == starts(0) + starts(3)


def test_shuffled_rewards_are_those_of_the_batch():
    episodes = [
        replace(demonstrate(SOURCE.train(i)), group=i, reward=float(i), end_reason=end)
        for i, end in enumerate(["done"] * 10 + ["failed"] * 2 + ["length"] * 4)
    ]
    shuffled = with_shuffled_rewards(episodes, seed=3)
    rewards = [episode.reward for episode in shuffled]
    assert sorted(rewards) == [float(i) for i in range(16)]
    assert rewards != sorted(rewards)
    assert rewards[10:12] == [10.0, 11.0]  # failed ones have none to give
    assert [replace(e, reward=0.0) for e in shuffled] == [replace(e, reward=0.0) for e in episodes]
    assert with_shuffled_rewards(episodes, seed=3) == shuffled
    assert with_shuffled_rewards(episodes, seed=4) != shuffled
