"""The protocols of the room: task, environment, source of tasks, token generator.

An environment sees and gives token ids only; what it gives is appended to the context as it is and
never trained.  Nothing is decoded and encoded again between turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_ext.rollout.types import Completion, Request

Metadata = Mapping[str, Any]


class Task(Protocol):
    """One problem; each source has its own kind."""

    @property
    def id(self) -> str:
        """Name of the task, the same in every run."""
        ...

    @property
    def metadata(self) -> Metadata:
        """What results are broken down by (family, level, ...)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What an environment answers to a turn of the policy."""

    ids: Sequence[int] = ()
    """Token ids appended to the context; they are not trained."""
    reward: float = 0.0
    """Added to the episode's reward; a number, at most 1e12 in size."""
    done: bool = False
    """The episode is over."""
    warning: str | None = None
    """What went wrong without spoiling the episode, to be counted (a verifier out of time, ...)."""


class Environment(Protocol):
    """The other side of one episode at a time."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a turn of the policy; such an id is the turn's last token."""
        ...

    @property
    def is_instant(self) -> bool:
        """Whether `reset` and `step` never wait for anything: they are then called in place,
        without a time limit."""
        ...

    def reset(self, task: Any, *, seed: int) -> Sequence[int]:
        """Begin an episode: the ids of its prompt, at least one.  Same task and seed, same ids."""
        ...

    def step(self, sampled: Sequence[int]) -> Observation:
        """Answer one turn: all ids that the policy sampled for it, a stop id included.

        A turn that was cut by a length limit has no stop id; it is answered too, and its reward
        counts.
        """
        ...


class TaskSource(Protocol):
    """Where tasks come from."""

    def train(self, position: int) -> Task:
        """The task at a position of an endless, seeded sequence: how one got there is no matter."""
        ...

    def held_out(self, count: int) -> Sequence[Task]:
        """The first `count` of the tasks that training never sees; the same in every run."""
        ...

    def environment(self) -> Environment:
        """A new environment for these tasks."""
        ...


class TokenGenerator(Protocol):
    """What samples tokens, many sequences at a time: a `rollout.session.RolloutSession`."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    def submit(self, request: Request, *, keep: bool = False) -> int:
        """Queue a sequence; its ticket.  Raises `ValueError` for one that cannot be sampled.

        keep: it can be continued after it has stopped, until it is released.
        """
        ...

    def extend(self, ticket: int, token_ids: Sequence[int], *, max_new_tokens: int) -> None:
        """Append ids to a kept sequence that has stopped and sample its next turn."""
        ...

    def release(self, ticket: int) -> None:
        """Forget a kept sequence."""
        ...

    def step(self) -> Sequence[Completion]:
        """Sample the next token of the running sequences; the turns that ended with it."""
        ...


@dataclass(frozen=True, kw_only=True)
class EpisodeStart:
    """One episode to run."""

    task: Task
    group: int = 0
    """Episodes of a group have the same task and seed, so the same prompt."""
    sample: int = 0
    """Which episode of its group this is."""
    seed: int = 0
    """Of the environment and, together with `sample`, of the sampling; 0 to 2**64 - 1."""


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Where an episode is cut; a cut episode is a truncated one."""

    max_new_tokens: int
    """Tokens the policy may sample, all turns together."""
    max_context: int
    """Tokens in all: prompt, turns and observations."""
    max_turns: int = 0
    """Turns of the policy; 0 = no limit."""
    max_turn_tokens: int = 0
    """Tokens of one turn of the policy; 0 = no limit."""
