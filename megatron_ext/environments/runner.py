"""Drives many episodes at once: turns from a token generator, answers from environments.

    runner = EpisodeRunner(source.environment, limits=limits, sampling=config.sampling)
    episodes = engine.run(lambda session: runner.run(session, starts), version=step)

A prompt is submitted once; each answer of an environment is appended to the same sequence as ids.
Invariants the tests check: every start gives one episode, in order, whatever environments do; what
an episode holds is what the generator sampled and the environment gave, id for id.
Not covered: what a failed episode means for its group (the caller sees `Episode.error`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron_ext.environments.base import (
    Environment,
    EpisodeLimits,
    EpisodeStart,
    Observation,
    TokenGenerator,
)
from megatron_ext.environments.calls import Attempt, Failure, TimedCalls, call_in_place
from megatron_ext.environments.episode import EndReason, Episode, EpisodeBuilder
from megatron_ext.rollout.types import Completion, Request, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Playing:
    """An episode that is going on."""

    place: int
    start: EpisodeStart
    environment: Environment
    builder: EpisodeBuilder
    reward: float = 0.0
    warnings: list[str] = field(default_factory=list)


class EpisodeRunner:
    """Plays episodes; keeps nothing of them afterwards."""

    def __init__(
        self,
        new_environment: Callable[[], Environment],
        *,
        limits: EpisodeLimits,
        sampling: SamplingParams | None = None,
        timed_calls: TimedCalls | None = None,
    ) -> None:
        """A runner for one kind of environment.

        timed_calls: threads for environments that are not instant; None = four threads, and 60
        seconds a call.
        """
        self._new_environment = new_environment
        self._limits = limits
        self._sampling = sampling or SamplingParams()
        self._timed_calls = timed_calls

    def run(
        self,
        generator: TokenGenerator,
        starts: Sequence[EpisodeStart],
        *,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Episode]:
        """One episode for every start, in their order.

        on_episode: told of each as it ends.
        """
        episodes: dict[int, Episode] = {}

        def keep(place: int, episode: Episode) -> None:
            episodes[place] = episode
            if on_episode is not None:
                on_episode(episode)

        playing: dict[int, _Playing] = {}
        for place, begun in enumerate(self._begin(starts)):
            ticket = begun if isinstance(begun, Failure) else self._submit(generator, begun)
            if isinstance(ticket, Failure):
                keep(place, _failed(starts[place], ticket))
            else:
                assert not isinstance(begun, Failure)
                playing[ticket] = begun
        try:
            while playing:
                for ticket, episode in self._advance(generator, playing):
                    keep(playing.pop(ticket).place, episode)
                    generator.release(ticket)
        finally:
            for ticket in playing:
                generator.release(ticket)
        _report_failures(list(episodes.values()))
        return [episodes[place] for place in range(len(starts))]

    def _begin(self, starts: Sequence[EpisodeStart]) -> list[_Playing | Failure]:
        """New environments, reset, with their prompts; those that fail cost themselves."""
        environments = [self._new_environment() for _ in starts]
        outcomes = self._call(
            [
                partial(_prompt, environment, start)
                for environment, start in zip(environments, starts, strict=True)
            ],
            environments,
        )
        return [
            prompt
            if isinstance(prompt, Failure)
            else _Playing(
                place=place,
                start=starts[place],
                environment=environments[place],
                builder=EpisodeBuilder(prompt),
            )
            for place, prompt in enumerate(outcomes)
        ]

    def _submit(self, generator: TokenGenerator, playing: _Playing) -> int | Failure:
        """Ticket of the episode's first turn; a prompt that cannot be sampled is a failure."""
        budget = self._budget(playing.builder)
        if budget < 1:
            return Failure(
                reason=f"the prompt of {len(playing.builder.ids)} tokens leaves no room in the "
                f"context of {self._limits.max_context}"
            )
        request = Request(
            prompt_ids=tuple(playing.builder.ids),
            max_new_tokens=budget,
            sampling=self._sampling,
            seed=playing.start.seed,
            sample=playing.start.sample,
            stop_ids=playing.environment.stop_ids,
        )
        with Attempt() as attempt:
            return generator.submit(request, keep=True)
        assert attempt.failure is not None
        return attempt.failure

    def _advance(
        self, generator: TokenGenerator, playing: dict[int, _Playing]
    ) -> list[tuple[int, Episode]]:
        """One step of the generator; the episodes that ended with it."""
        turns = [(turn, playing[turn.ticket]) for turn in generator.step()]
        outcomes = self._call(
            [partial(_answer, episode.environment, turn) for turn, episode in turns],
            [episode.environment for _, episode in turns],
        )
        ended = []
        for (turn, episode), outcome in zip(turns, outcomes, strict=True):
            episode.builder.append_sampled(
                turn.token_ids, logprobs=turn.logprobs, versions=turn.versions
            )
            if isinstance(outcome, Failure):
                ended.append((turn.ticket, _failed(episode.start, outcome, episode)))
            elif reason := self._apply(outcome, turn, episode):
                ended.append((turn.ticket, _finished(episode, reason)))
            else:
                generator.extend(
                    turn.ticket, outcome.ids, max_new_tokens=self._budget(episode.builder)
                )
        return ended

    def _apply(
        self, observation: Observation, turn: Completion, episode: _Playing
    ) -> EndReason | None:
        """Take an observation into the episode; why that was the end, or None."""
        episode.reward += observation.reward
        if observation.warning is not None:
            episode.warnings.append(observation.warning)
        if observation.done:
            # An answer that a limit cut off is answered, and may earn, but is a truncated one.
            return "done" if turn.stop_reason == "stop" else "length"
        builder, limits = episode.builder, self._limits
        if limits.max_turns and builder.num_turns >= limits.max_turns:
            return "turns"
        if not self._has_room(builder, given=len(observation.ids)):
            return "length"
        builder.append_given(observation.ids)
        return None

    def _has_room(self, builder: EpisodeBuilder, *, given: int) -> bool:
        """Whether a token can be sampled after so many more given ones."""
        return (
            len(builder.ids) + given < self._limits.max_context
            and builder.num_sampled < self._limits.max_new_tokens
        )

    def _budget(self, builder: EpisodeBuilder) -> int:
        """Tokens the next turn may have."""
        limits = self._limits
        budget = min(
            limits.max_new_tokens - builder.num_sampled, limits.max_context - len(builder.ids)
        )
        return min(budget, limits.max_turn_tokens) if limits.max_turn_tokens else budget

    def _call(self, calls: list[Callable], environments: list[Environment]) -> list:
        """Results of calls of environments, which are all of one kind."""
        if not calls:
            return []
        if environments[0].is_instant:
            return call_in_place(calls)
        if self._timed_calls is None:
            self._timed_calls = TimedCalls(workers=4, time_limit=60.0)
        return self._timed_calls(calls)


def _report_failures(episodes: Sequence[Episode]) -> None:
    reasons = Counter(episode.error for episode in episodes if not episode.is_valid)
    if reasons:
        (reason, count), *_ = reasons.most_common(1)
        logger.warning(
            "%d of %d episodes failed and count for nothing; %d of them: %s",
            reasons.total(),
            len(episodes),
            count,
            reason,
        )


def _prompt(environment: Environment, start: EpisodeStart) -> list[int]:
    prompt = list(environment.reset(start.task, seed=start.seed))
    if not prompt:
        raise ValueError("the environment gave an empty prompt")
    return prompt


def _answer(environment: Environment, turn: Completion) -> Observation:
    observation = environment.step(turn.token_ids)
    if not isinstance(observation, Observation):
        raise TypeError(f"the environment answered {type(observation).__name__}, no Observation")
    if not math.isfinite(observation.reward):
        raise ValueError(f"the environment gave the reward {observation.reward}")
    return observation


def _finished(episode: _Playing, reason: EndReason) -> Episode:
    start = episode.start
    return episode.builder.finish(
        task_id=start.task.id,
        group=start.group,
        sample=start.sample,
        seed=start.seed,
        reward=episode.reward,
        end_reason=reason,
        warnings=episode.warnings,
        metadata=start.task.metadata,
    )


def _failed(start: EpisodeStart, failure: Failure, episode: _Playing | None = None) -> Episode:
    builder = EpisodeBuilder([]) if episode is None else episode.builder
    return builder.finish(
        task_id=start.task.id,
        group=start.group,
        sample=start.sample,
        seed=start.seed,
        reward=0.0,
        end_reason="failed",
        error=failure.reason,
        metadata=start.task.metadata,
    )
