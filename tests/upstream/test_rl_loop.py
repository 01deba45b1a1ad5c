"""The loop on several ranks: what every rank is told, whoever played the episodes."""

from __future__ import annotations

import logging
import logging.handlers
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_ext.environments.arithmetic import ArithmeticEnvironment
from megatron_ext.environments.base import Observation
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.report.gaps import Gaps
from megatron_ext.rewards.verifiers import Verifiers
from megatron_ext.rl.stop import NeverStops
from megatron_ext.upstream.arguments import parse
from megatron_ext.upstream.checkpoint import Progress
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.layout import open_layout
from megatron_ext.upstream.learner import MegatronLearner
from megatron_ext.upstream.model import build_trainable
from megatron_ext.upstream.rl_run import episode_limits, open_loop
from megatron_ext.upstream.step import build_stepper
from tests.marks import slow_except
from tests.ranks import RankPool
from tests.upstream.rl_jobs import REINFORCE, SMALL

LAYOUTS = {
    "one rank": (1, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
}
SECONDS = 0.002

ALONE = {"start": Progress(), "stop": NeverStops(), "gaps": Gaps()}
"""A loop that begins anew and that nothing stops."""


class Slow(ArithmeticEnvironment):
    """Every answer takes two milliseconds."""

    def step(self, sampled: Sequence[int]) -> Observation:
        time.sleep(SECONDS)
        return super().step(sampled)


def opened(words: list[str]) -> tuple[list[str], object]:
    """What a rank says at the start, and what config.json says of the preset."""
    said = logging.handlers.BufferingHandler(100)
    logger = logging.getLogger("megatron_ext.upstream.rl_run")
    logger.addHandler(said)
    with device_mode(), Verifiers(parse(words).rewards) as verify:
        options = parse(words)
        layout = open_layout(options.megatron)
        model = build_trainable(options.megatron, layout)
        stepper = build_stepper(options, model=model, layout=layout)
        learner = MegatronLearner(options, stepper, is_new=True)
        open_loop(options, learner, verify=verify, **ALONE).close()
    return [r.getMessage() for r in said.buffer], options.as_record().get("changed_preset")


def step_metrics(words: list[str]) -> dict[str, float]:
    """Of one step with slow environments."""
    with device_mode(), Verifiers(parse(words).rewards) as verify:
        options = parse(words)
        layout = open_layout(options.megatron)
        model = build_trainable(options.megatron, layout)
        stepper = build_stepper(options, model=model, layout=layout)
        learner = MegatronLearner(options, stepper, is_new=True)
        loop = open_loop(options, learner, verify=verify, **ALONE)
        runner = EpisodeRunner(
            Slow, limits=episode_limits(options), sampling=options.rollout.sampling
        )
        return replace(loop, runner=runner).step(1, consumed=0)


@pytest.mark.parametrize("name", slow_except((), LAYOUTS))
def test_d1_reward_seconds_are_those_of_all_replicas_on_every_rank(ranks: RankPool, name: str):
    size, flags = LAYOUTS[name]
    words = [*SMALL, *REINFORCE, "--eval-every", "0", "--rollout-max-new-tokens", "6"]
    found = ranks(size).run(step_metrics, [*words, *flags.split()])
    seconds = {metrics["reward_seconds"] for metrics in found}
    assert len(seconds) == 1, found  # also on rank 0, which writes, but plays nothing on pp2
    answers = found[0]["turns_mean"] * found[0]["episodes"]
    assert found[0]["episodes"] == 16
    assert seconds.pop() >= SECONDS * answers


@pytest.mark.slow
def test_d4_an_overruled_preset_is_told_once_and_recorded(ranks: RankPool):
    words = [*SMALL, *REINFORCE, "--eval-every", "0", "--pipeline-model-parallel-size", "2"]
    changed = "preset grpo-plus: --clip-high 0.3 (preset 0.28), --kl-coefficient 0.1 (preset 0.0)"
    found = ranks(2).run(opened, [*words, "--clip-high", "0.3", "--kl-coefficient", "0.1"])
    assert found == [([changed], changed), ([], changed)]
    assert ranks(2).run(opened, words) == [([], None)] * 2
