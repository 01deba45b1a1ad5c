"""Many episodes at once: each its own, in order, whatever environments do."""

from __future__ import annotations

import gc
import logging
import random
import sys
import threading
import time
from dataclasses import replace

import pytest

from megatron_ext.environments.arithmetic import (
    MAX_CONTEXT,
    ArithmeticEnvironment,
    ArithmeticSource,
)
from megatron_ext.environments.arithmetic_demonstrations import demonstrate
from megatron_ext.environments.arithmetic_tasks import TOKENIZER, ArithmeticTask
from megatron_ext.environments.base import EpisodeLimits, EpisodeStart, Observation
from megatron_ext.environments.calls import TimedCalls
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.rollout.types import SamplingParams
from tests.environments.scripted import ScriptedGenerator, expert

LIMITS = EpisodeLimits(max_new_tokens=MAX_CONTEXT, max_context=MAX_CONTEXT)
SOURCE = ArithmeticSource()
CHAIN = ArithmeticTask(family="chain", start=12, operations=(("+", 7), ("-", 5)))


def starts_of(tasks):
    return [EpisodeStart(task=task, group=i, sample=i % 3, seed=i) for i, task in enumerate(tasks)]


def play(starts, *, environment=ArithmeticEnvironment, limits=LIMITS, policy=expert, timed=None):
    generator = ScriptedGenerator(policy=policy)
    runner = EpisodeRunner(environment, limits=limits, timed_calls=timed)
    episodes = runner.run(generator, starts)
    assert not generator.sequences, "a sequence was not released"
    return episodes, generator


def text_policy(*turns):
    """A policy that says these turns one after the other, in every episode."""

    def policy(context):
        said = TOKENIZER.decode(context).count("=")
        return TOKENIZER.encode(turns[min(said, len(turns) - 1)])

    return policy


def test_every_start_gives_its_episode_id_for_id():
    starts = starts_of(SOURCE.train(position) for position in range(100))
    told = []
    generator = ScriptedGenerator()
    runner = EpisodeRunner(ArithmeticEnvironment, limits=LIMITS, sampling=SamplingParams(top_k=3))
    episodes = runner.run(generator, starts, on_episode=told.append)
    assert len(told) == 100 and {id(e) for e in told} == {id(e) for e in episodes}
    for start, episode in zip(starts, episodes, strict=True):
        shown = demonstrate(start.task)
        assert (episode.ids, episode.turn_ids) == (shown.ids, shown.turn_ids)
        assert (episode.reward, episode.end_reason) == (1.0, "done")
        assert (episode.task_id, episode.metadata) == (start.task.id, start.task.metadata)
        assert (episode.group, episode.sample, episode.seed) == (
            start.group,
            start.sample,
            start.seed,
        )
        for place, turn in enumerate(episode.turn_ids):
            assert episode.logprobs[place] == (-place if turn >= 0 else 0)
            assert (episode.versions[place] >= 1) == (turn >= 0)
    assert {request.sampling.top_k for request in generator.requests} == {3}
    assert [(r.seed, r.sample) for r in generator.requests] == [(s.seed, s.sample) for s in starts]


def test_the_context_is_never_encoded_again():
    """A policy may sample any id, also one that no text gives; it stays what it was."""
    said = [37, 37, 1000, 7, 7, 15]
    (episode,), _ = play(starts_of([CHAIN]), policy=lambda context: said)
    assert episode.ids[: len(CHAIN.prompt)] == TOKENIZER.encode(CHAIN.prompt)
    assert [span.ids for span in episode.spans() if span.role == "policy"] == [said]
    assert (episode.reward, episode.end_reason) == (0, "length")


class Faulty(ArithmeticEnvironment):
    """Misbehaves for tasks that start at certain numbers."""

    is_instant = False
    never = threading.Event()

    def reset(self, task, *, seed=0):
        if task.start == 1:
            raise OSError("no disk")
        if task.start == 2:
            return []
        if task.start == 3:
            return [1000]
        if task.start == 4:
            self.never.wait()
        return super().reset(task, seed=seed)

    def step(self, sampled):
        start = self._task.start
        if start == 5:
            raise ZeroDivisionError("in step")
        if start == 6:
            self.never.wait()
        if start == 7:
            return "an answer"
        if start == 8:
            return Observation(reward=float("nan"), done=True)
        if start == 9:
            return Observation(reward=0.5, done=True, warning="slow")
        return super().step(sampled)


def test_a_bad_episode_costs_itself_only(caplog):
    tasks = [
        ArithmeticTask(family="chain", start=start, operations=(("+", 7), ("+", 1)))
        for start in range(12)
    ]
    timed = TimedCalls(workers=2, time_limit=0.3)
    with caplog.at_level(logging.WARNING):
        episodes, _ = play(starts_of(tasks), environment=Faulty, timed=timed)
    Faulty.never.set()
    errors = {e.group: e.error for e in episodes if not e.is_valid}
    expected = {
        1: "OSError: no disk",
        2: "ValueError: the environment gave an empty prompt",
        3: "ValueError: the environment gave the prompt with token ids [1000], which are not in",
        4: "no result within 0.3 seconds",
        5: "ZeroDivisionError: in step",
        6: "no result within 0.3 seconds",
        7: "TypeError: the environment answered str",
        8: "ValueError: the environment gave the reward nan",
    }
    assert errors.keys() == expected.keys()
    for group, reason in expected.items():
        assert str(errors[group]).startswith(reason)
    assert [e.reward for e in episodes] == [1, *[0] * 8, 0.5, 1, 1]
    assert episodes[9].warnings == ("slow",)
    assert "8 of 12 episodes failed and count for nothing" in caplog.text


def test_episodes_know_what_their_environment_took():
    """All calls of an episode, and of one that is given up the time until then."""
    tasks = [
        ArithmeticTask(family="chain", start=n, operations=(("+", 7), ("+", 1))) for n in range(3)
    ]

    class Slow(ArithmeticEnvironment):
        is_instant = False
        never = threading.Event()

        def step(self, sampled):
            if self._task.start == 2:
                self.never.wait()
            time.sleep(0.02 if self._task.start else 0)
            return super().step(sampled)

    started = time.monotonic()
    with TimedCalls(workers=3, time_limit=0.3) as timed:
        (quick, slow, hung), _ = play(starts_of(tasks), environment=Slow, timed=timed)
    Slow.never.set()
    assert 0 < quick.environment_seconds < slow.environment_seconds
    assert slow.num_turns > 1 and slow.environment_seconds >= 0.02 * slow.num_turns
    assert 0.3 <= hung.environment_seconds <= time.monotonic() - started
    assert replace(slow, environment_seconds=0.0) == slow  # a clock is no part of what happened


@pytest.mark.parametrize(
    ("limits", "end", "text"),
    [
        ({}, "done", "Q12b+7c-5?b+7;=19;c-5;=14;A14."),
        ({"max_turns": 3}, "done", "Q12b+7c-5?b+7;=19;c-5;=14;A14."),
        ({"max_turns": 2}, "turns", "Q12b+7c-5?b+7;=19;c-5;"),
        ({"max_turn_tokens": 4}, "done", "Q12b+7c-5?b+7;=19;c-5;=14;A14."),
        ({"max_turn_tokens": 3}, "length", "Q12b+7c-5?b+7"),
        ({"max_new_tokens": 12}, "done", "Q12b+7c-5?b+7;=19;c-5;=14;A14."),
        ({"max_new_tokens": 11}, "length", "Q12b+7c-5?b+7;=19;c-5;=14;A14"),
        ({"max_new_tokens": 8}, "length", "Q12b+7c-5?b+7;=19;c-5;"),
        ({"max_context": 30}, "done", "Q12b+7c-5?b+7;=19;c-5;=14;A14."),
        ({"max_context": 29}, "length", "Q12b+7c-5?b+7;=19;c-5;=14;A14"),
        ({"max_context": 26}, "length", "Q12b+7c-5?b+7;=19;c-5;"),
        ({"max_context": 11}, "length", "Q12b+7c-5?b"),
    ],
)
def test_limits_cut_where_they_say(limits, end, text):
    values = {"max_new_tokens": 160, "max_context": 160} | limits
    (episode,), _ = play(starts_of([CHAIN]), limits=EpisodeLimits(**values))
    assert (episode.end_reason, TOKENIZER.decode(episode.ids)) == (end, text)
    assert episode.is_truncated == (end != "done")
    assert episode.is_valid and episode.reward == (1.0 if end == "done" else 0.0)


def test_a_prompt_without_room_is_a_failure():
    (episode,), generator = play(
        starts_of([CHAIN]), limits=EpisodeLimits(max_new_tokens=9, max_context=10)
    )
    assert episode.error == "the prompt of 10 tokens leaves no room in the context of 10"
    assert not generator.requests and episode.ids == []


def test_no_episode_is_no_work():
    assert play([])[0] == []


def test_an_error_of_the_generator_is_raised_and_leaves_nothing():
    generator = ScriptedGenerator(policy=lambda context: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        EpisodeRunner(ArithmeticEnvironment, limits=LIMITS).run(generator, starts_of([CHAIN] * 5))
    assert not generator.sequences


@pytest.mark.slow
def test_ten_thousand_episodes_leak_nothing():
    """Their memory is that of the episodes that the caller keeps: none here."""
    rng = random.Random(0)

    def sometimes_wrong(context):
        return expert(context) if rng.random() < 0.9 else TOKENIZER.encode("b+;")

    runner = EpisodeRunner(ArithmeticEnvironment, limits=LIMITS)
    right = 0

    def rollout(step: int) -> int:
        starts = starts_of(SOURCE.train(step * 500 + i) for i in range(500))
        episodes = runner.run(ScriptedGenerator(policy=sometimes_wrong), starts)
        assert all(episode.is_valid for episode in episodes)
        return sum(episode.reward for episode in episodes)

    started, blocks = time.process_time(), []
    for step in range(20):
        right += rollout(step)
        if step in (4, 19):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
    assert right > 5000
    assert blocks[1] - blocks[0] < 2000  # one rollout of 500 episodes holds over 10,000
    assert time.process_time() - started < 30
