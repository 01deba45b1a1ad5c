"""Episodes played by the rollout engine itself, with a small model that knows nothing."""

from __future__ import annotations

import pytest

from megatron_ext.environments.arithmetic import MAX_CONTEXT, ArithmeticSource
from megatron_ext.environments.arithmetic_tasks import TOKENIZER
from megatron_ext.environments.base import EpisodeLimits, EpisodeStart
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.rollout.config import RolloutConfig
from megatron_ext.rollout.engine import RolloutEngine
from tests.rollout.toy_model import ToyDecoder

SOURCE = ArithmeticSource()
STARTS = [
    EpisodeStart(task=SOURCE.train(group), group=group, sample=sample, seed=group)
    for group in range(6)
    for sample in range(4)
]
LIMITS = EpisodeLimits(max_new_tokens=80, max_context=MAX_CONTEXT, max_turns=12)


def play(*, slots):
    decoder = ToyDecoder(vocab_size=TOKENIZER.size, max_context=MAX_CONTEXT)
    engine = RolloutEngine(decoder, RolloutConfig(rollout_slots=slots))
    runner = EpisodeRunner(SOURCE.environment, limits=LIMITS)
    episodes = engine.run(lambda session: runner.run(session, STARTS), version=7)
    assert engine.session.num_unfinished == 0
    return episodes


@pytest.fixture(scope="module")
def episodes():
    """One rollout, four sequences at a time."""
    return play(slots=4)


def test_each_episode_is_a_dialogue_with_the_calculator(episodes):
    assert max(episode.num_turns for episode in episodes) > 3
    for episode, start in zip(episodes, STARTS, strict=True):
        assert episode.is_valid and episode.num_sampled <= 80 and len(episode.ids) <= MAX_CONTEXT
        environment = SOURCE.environment()
        spans = episode.spans()
        assert next(spans).ids == environment.reset(start.task)
        for span in spans:
            if span.role == "policy":
                answer = environment.step(span.ids)
            else:
                assert span.ids == list(answer.ids)
        assert {version for version in episode.versions if version >= 0} == {7}
        assert all(
            (value < 0) == trained
            for value, trained in zip(episode.logprobs, episode.mask, strict=True)
        )


def test_samples_of_a_group_share_the_prompt_and_differ(episodes):
    for group in range(6):
        members = [episode for episode in episodes if episode.group == group]
        assert len({tuple(next(episode.spans()).ids) for episode in members}) == 1
        assert len({tuple(episode.ids) for episode in members}) == 4


def test_ids_do_not_depend_on_how_many_play_at_once(episodes):
    for one, other in zip(episodes, play(slots=17), strict=True):
        assert (one.ids, one.turn_ids, one.end_reason) == (
            other.ids,
            other.turn_ids,
            other.end_reason,
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)  # float64 model
