"""A run that is wrong at its first step says so; one without anything to train ends."""

import logging

import pytest
import torch

from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.learning import Learned
from megatron_ext.rl.policy import Update
from megatron_ext.rl.scoring import score_episodes
from megatron_ext.rl.types import Episodes
from megatron_ext.rl.watch import MOST_IDLE_STEPS, NothingToTrain, Watch

RIGHT = {
    "ratio_deviation": 0.0,
    "sampler_gap": 1e-6,
    "clip_fraction_low": 0.0,
    "clip_fraction_high": 0.0,
}
DROP = AlgorithmConfig(algorithm="grpo-plus", zero_variance_groups="drop")


def learned(*updates, **changes):
    """A step whose episodes are all in one group of equal rewards."""
    scored = score_episodes(
        Episodes(
            rewards_E=torch.ones(4),
            groups_E=torch.zeros(4, dtype=torch.int64),
            is_valid_E=torch.tensor([True, True, True, False]),
            is_truncated_E=torch.zeros(4, dtype=torch.bool),
            num_tokens_E=torch.ones(4, dtype=torch.int64),
        ),
        DROP,
        max_response_tokens=8,
    )
    made = [
        Update(
            loss=0.0,
            statistics=RIGHT | changes,
            num_trained=4,
            num_positions=8,
            grad_norm=1.0,
            learning_rate=1e-3,
            skipped=False,
        )
        for _ in updates
    ]
    return Learned(scored=scored, updates=made, num_tokens=0, num_passes=1)


def watch(*, algorithm=DROP, is_half=False, is_writer=True, idle_steps=0):
    return Watch(algorithm, is_half=is_half, is_writer=is_writer, idle_steps=idle_steps)


def test_a_right_first_step_is_silent(caplog):
    watch()(1, learned("update"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ratio_deviation": 0.01}, "differ from it by 0.01"),
        ({"ratio_deviation": float("nan")}, "nan"),
        ({"clip_fraction_high": 0.02}, "clip_fraction_high is 0.02"),
        ({"sampler_gap": 0.05}, "0.05 nats a token"),
    ],
)
def test_a_wrong_first_step_is_loud_and_names_causes(changes, named, caplog):
    looking = watch()
    looking(1, learned("update", **changes))
    looking(2, learned("update", **changes))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert "NOT ON POLICY at step 1" in message
    assert named in message
    assert "temperature" in message


def test_sixteen_bits_may_differ_more_and_so_may_a_sampler_as_old_policy(caplog):
    watch(is_half=True)(1, learned("update", sampler_gap=0.05))
    sampler = AlgorithmConfig(algorithm="importance-sampling", old_policy="sampler")
    watch(algorithm=sampler)(1, learned("update", ratio_deviation=0.005))
    assert not caplog.records


def test_only_the_writer_speaks(caplog):
    watch(is_writer=False)(1, learned("update", sampler_gap=1.0))
    assert not caplog.records


def test_steps_without_anything_to_train_end_the_run(caplog):
    looking = watch()
    for step in range(1, MOST_IDLE_STEPS):
        looking(step, learned())
    looking(MOST_IDLE_STEPS, learned("update"))  # starts the count again
    for step in range(MOST_IDLE_STEPS - 1):
        looking(step, learned())
        looking.end_if_idle()
    looking(9, learned())
    with pytest.raises(NothingToTrain, match=r"1 failed .* in 1 of 1 groups"):
        looking.end_if_idle()


def test_r11_idle_steps_before_a_resume_count():
    looking = watch(idle_steps=MOST_IDLE_STEPS - 1)
    looking.end_if_idle()
    looking(5, learned())
    with pytest.raises(NothingToTrain, match=r"for 5 steps"):
        looking.end_if_idle()
    resumed = watch(idle_steps=MOST_IDLE_STEPS)  # saved at the fifth, with other tasks now
    resumed.end_if_idle()
    resumed(6, learned("update"))
    resumed.end_if_idle()
    assert resumed.idle_steps == 0
