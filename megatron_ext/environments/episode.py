"""The record of an episode, and the only way to make one: append sampled ids, or other ids.

Invariants the tests check: only sampled ids have a mask, a turn, a log-prob and a version; ids are
those that were appended, in that order; a packed sample has the same ids, mask and log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch

from megatron_ext.packing.batch import Sample

SAMPLER_LOGPROBS = "sampler_logprobs"
"""Extra of a sample: log-probs that the sampler recorded."""

EndReason = Literal["done", "length", "turns", "failed"]
"""The environment ended it; tokens or context ran out; turns ran out; it counts for nothing."""


class Span(NamedTuple):
    """Consecutive tokens with one origin."""

    role: Literal["prompt", "policy", "environment"]
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One finished episode; lists have one entry for each token, prompt included."""

    task_id: str
    group: int
    sample: int
    seed: int
    ids: list[int]
    turn_ids: list[int]
    """Turn of the policy each token was sampled in, from 0; -1 = not sampled, so not trained."""
    logprobs: list[float]
    """Log-prob of each token under the distribution it was drawn from; 0 = not sampled."""
    versions: list[int]
    """Version of the weights that sampled each token; -1 = not sampled."""
    reward: float
    """Sum of the environment's rewards; 0 for a failed episode, where it means nothing."""
    end_reason: EndReason
    error: str | None = None
    """Why the episode failed; None = it did not."""
    warnings: tuple[str, ...] = ()
    """What the environment complained of."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The task's."""
    environment_seconds: float = field(default=0.0, compare=False)
    """What the calls of its environment took, rewards included."""

    @property
    def mask(self) -> list[bool]:
        """Which tokens are trained: those the policy sampled."""
        return [turn >= 0 for turn in self.turn_ids]

    @property
    def is_valid(self) -> bool:
        """Whether the reward means anything."""
        return self.end_reason != "failed"

    @property
    def is_truncated(self) -> bool:
        """Whether a limit cut it."""
        return self.end_reason in ("length", "turns")

    @property
    def num_sampled(self) -> int:
        """Tokens the policy sampled."""
        return sum(self.mask)

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return 1 + max(self.turn_ids, default=-1)

    def spans(self) -> Iterator[Span]:
        """The episode's parts in order: prompt, policy, environment, policy, ..."""
        start = 0
        for turn, members in groupby(self.turn_ids):
            ids = self.ids[start : start + sum(1 for _ in members)]
            role = "policy" if turn >= 0 else "environment" if start else "prompt"
            yield Span(role, ids)
            start += len(ids)

    def to_sample(self, **extras: float) -> Sample:
        """The episode as a training sample, with the sampler's log-probs.

        extras: more values that are the same for every sampled token (an advantage) and 0 for the
        others.
        """
        turn_ids = torch.tensor(self.turn_ids, dtype=torch.int64)
        mask = turn_ids >= 0
        return Sample(
            tokens=torch.tensor(self.ids, dtype=torch.int64),
            mask=mask,
            turn_ids=turn_ids,
            extras={
                SAMPLER_LOGPROBS: torch.tensor(self.logprobs, dtype=torch.float32),
                **{name: torch.where(mask, value, 0.0) for name, value in extras.items()},
            },
        )


class EpisodeBuilder:
    """Tokens of an episode that is going on; `ids` are all of them so far."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = []
        self.num_turns = 0
        self.num_sampled = 0
        self._turn_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.append_given(prompt)

    def append_given(self, ids: Sequence[int]) -> None:
        """Append ids that the policy did not choose."""
        self._append(ids, [0.0] * len(ids), [-1] * len(ids), turn=-1)

    def append_sampled(
        self,
        ids: Sequence[int],
        *,
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Append a turn of the policy; without log-probs and versions it is a demonstration's."""
        self._append(
            ids,
            [0.0] * len(ids) if logprobs is None else logprobs,
            [0] * len(ids) if versions is None else versions,
            turn=self.num_turns,
        )
        self.num_turns += 1
        self.num_sampled += len(ids)

    def finish(
        self,
        *,
        task_id: str,
        reward: float,
        end_reason: EndReason,
        group: int = 0,
        sample: int = 0,
        seed: int = 0,
        error: str | None = None,
        warnings: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        environment_seconds: float = 0.0,
    ) -> Episode:
        """The record of the episode; the builder is not used again."""
        return Episode(
            task_id=task_id,
            group=group,
            sample=sample,
            seed=seed,
            ids=self.ids,
            turn_ids=self._turn_ids,
            logprobs=self._logprobs,
            versions=self._versions,
            reward=reward,
            end_reason=end_reason,
            error=error,
            warnings=tuple(warnings),
            metadata={} if metadata is None else metadata,
            environment_seconds=environment_seconds,
        )

    def _append(
        self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, turn: int
    ) -> None:
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"{len(ids)} ids, {len(logprobs)} log-probs and {len(versions)} versions: each id "
                "needs one of each."
            )
        self.ids += ids
        self._turn_ids += [turn] * len(ids)
        self._logprobs += logprobs
        self._versions += versions
