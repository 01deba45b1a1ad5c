"""Drives many episodes at once: turns from a token generator, answers from environments.

    runner = EpisodeRunner(source.environment, limits=limits, sampling=config.sampling)
    episodes = engine.run(lambda session: runner.run(session, starts), version=step)

A prompt is submitted once; each answer of an environment is appended to the same sequence as ids.
Invariants the tests check: every start gives one episode, in order, whatever environments do or
raise; what an episode holds is what the generator sampled and the environment gave, id for id.
Not covered: what a failed episode means for its group (the caller sees `Episode.error`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron_ext.environments.answers import answer_of, prompt_of
from megatron_ext.environments.base import (
    Environment,
    EpisodeLimits,
    EpisodeStart,
    Observation,
    TokenGenerator,
)
from megatron_ext.environments.calls import Clocked, Failure, TimedCalls, call_in_place
from megatron_ext.environments.episode import EndReason, Episode, EpisodeBuilder
from megatron_ext.rollout.types import Completion, Request, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Playing:
    """An episode that is going on."""

    place: int
    start: EpisodeStart
    environment: Environment
    is_instant: bool
    stop_ids: frozenset[int]
    builder: EpisodeBuilder
    reward: float = 0.0
    seconds: float = 0.0
    """Of the environment's calls."""
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
        for place, begun in enumerate(self._begin(starts, vocab_size=generator.vocab_size)):
            ticket = begun if isinstance(begun, Episode) else self._submit(generator, begun)
            if isinstance(ticket, Episode):
                keep(place, ticket)
            else:
                assert not isinstance(begun, Episode)
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

    def _begin(
        self, starts: Sequence[EpisodeStart], *, vocab_size: int
    ) -> list[_Playing | Episode]:
        """New environments, reset, with their prompts; those that fail cost themselves."""
        begun: dict[int, _Playing | Episode] = {}
        ready: list[tuple[int, Environment, bool]] = []
        opened = call_in_place([partial(_open, self._new_environment)] * len(starts))
        for place, found in enumerate(opened):
            if isinstance(found, Failure):
                begun[place] = _failed(starts[place], found)
            else:
                ready.append((place, *found))
        is_instant = all(instant for *_, instant in ready)
        calls = [
            Clocked(partial(prompt_of, environment, starts[place], vocab_size=vocab_size))
            for place, environment, _ in ready
        ]
        outcomes = self._call(calls, is_instant=is_instant)
        for (place, environment, _), call, outcome in zip(ready, calls, outcomes, strict=True):
            if isinstance(outcome, Failure):
                begun[place] = _failed(starts[place], outcome, seconds=call.seconds)
            else:
                begun[place] = _Playing(
                    place=place,
                    start=starts[place],
                    environment=environment,
                    is_instant=is_instant,
                    stop_ids=outcome.stop_ids,
                    builder=EpisodeBuilder(outcome.ids),
                    seconds=call.seconds,
                )
        return [begun[place] for place in range(len(starts))]

    def _submit(self, generator: TokenGenerator, playing: _Playing) -> int | Episode:
        """Ticket of the episode's first turn; a prompt that cannot be sampled is a failure."""
        budget = self._budget(playing.builder)
        request = Request(
            prompt_ids=tuple(playing.builder.ids),
            max_new_tokens=budget,
            sampling=self._sampling,
            seed=playing.start.seed,
            sample=playing.start.sample,
            stop_ids=playing.stop_ids,
        )
        try:
            if budget < 1:
                raise ValueError(
                    f"the prompt of {len(playing.builder.ids)} tokens leaves no room in the "
                    f"context of {self._limits.max_context}"
                )
            return generator.submit(request, keep=True)
        except ValueError as error:
            failure = Failure(reason=" ".join(str(error).split()))
            return _failed(playing.start, failure, seconds=playing.seconds)

    def _advance(
        self, generator: TokenGenerator, playing: dict[int, _Playing]
    ) -> list[tuple[int, Episode]]:
        """One step of the generator; the episodes that ended with it."""
        turns = [(turn, playing[turn.ticket]) for turn in generator.step()]
        calls = [
            Clocked(
                partial(
                    answer_of,
                    episode.environment,
                    turn.token_ids,
                    vocab_size=generator.vocab_size,
                )
            )
            for turn, episode in turns
        ]
        outcomes = self._call(calls, is_instant=all(e.is_instant for _, e in turns))
        ended = []
        for (turn, episode), call, outcome in zip(turns, calls, outcomes, strict=True):
            episode.seconds += call.seconds
            episode.builder.append_sampled(
                turn.token_ids, logprobs=turn.logprobs, versions=turn.versions
            )
            if isinstance(outcome, Failure):
                failed = _failed(
                    episode.start, outcome, builder=episode.builder, seconds=episode.seconds
                )
                ended.append((turn.ticket, failed))
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

    def _call[T](self, calls: list[Clocked[T]], *, is_instant: bool) -> list[T | Failure]:
        """Results of calls of environments."""
        if not calls:
            return []
        if is_instant:
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


def _open(new_environment: Callable[[], Environment]) -> tuple[Environment, bool]:
    """An environment, and whether it is instant."""
    environment = new_environment()
    return environment, bool(environment.is_instant)


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
        environment_seconds=episode.seconds,
    )


def _failed(
    start: EpisodeStart,
    failure: Failure,
    *,
    builder: EpisodeBuilder | None = None,
    seconds: float = 0.0,
) -> Episode:
    return (builder or EpisodeBuilder([])).finish(
        task_id=start.task.id,
        group=start.group,
        sample=start.sample,
        seed=start.seed,
        reward=0.0,
        end_reason="failed",
        error=failure.reason,
        metadata=start.task.metadata,
        environment_seconds=seconds,
    )
