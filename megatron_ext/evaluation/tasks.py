"""Evaluation of a policy on tasks: which episodes to play, and what they say.

    starts = evaluation_starts(tasks, samples=8, seed=0)
    result = summarize(runner.run(session, starts), ks=(1, 8))

Invariants the tests check: every task has the same number of samples; failed episodes are counted
and belong to no rate; an episode passes where it earned the full reward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_ext.environments.base import EpisodeStart, Task
from megatron_ext.environments.episode import Episode
from megatron_ext.environments.seeds import derived_seed
from megatron_ext.evaluation.pass_rates import (
    Rate,
    bootstrap_interval,
    pass_at_k,
    wilson_interval,
)

PASSING_REWARD = 1.0
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a policy did on a set of tasks."""

    pass_at: Mapping[int, Rate]
    """pass@k by k, over the tasks with at least k valid episodes."""
    mean_reward: float
    """Over valid episodes."""
    num_tasks: int
    """Tasks with a valid episode."""
    num_episodes: int
    """Valid ones."""
    num_failed: int
    """Episodes that count for nothing (the environment or the reward failed)."""
    num_truncated: int
    """Valid episodes that a limit cut."""
    num_sampled: int
    """Tokens the policy sampled in valid episodes."""
    groups: Mapping[str, Rate] = field(default_factory=dict)
    """pass@1 of the tasks that share a value of metadata, as "family=chain"."""

    def metrics(self, prefix: str = "eval_") -> dict[str, float]:
        """The numbers by name, for a run's record."""
        rates = {f"pass_at_{k}": rate for k, rate in self.pass_at.items()}
        bounds = {
            f"{prefix}{name}{end}": value
            for name, rate in rates.items()
            for end, value in (("", rate.value), ("_low", rate.low), ("_high", rate.high))
        }
        return {
            **bounds,
            f"{prefix}reward_mean": self.mean_reward,
            f"{prefix}episodes": self.num_episodes,
            f"{prefix}failed_episodes": self.num_failed,
            f"{prefix}truncated_share": self.num_truncated / self.num_episodes,
        }

    def as_record(self) -> dict[str, Any]:
        """Everything, as a JSON object."""
        return asdict(self)


def passes(episode: Episode, *, passing_reward: float = PASSING_REWARD) -> bool:
    """Whether an episode is valid and earned the full reward."""
    return episode.is_valid and episode.reward >= passing_reward - _ROUNDING


def evaluation_starts(tasks: Iterable[Task], *, samples: int, seed: int) -> list[EpisodeStart]:
    """`samples` episodes of every task, one group a task."""
    if samples < 1:
        raise ValueError(f"{samples} samples of each task show nothing: take at least 1.")
    return [
        EpisodeStart(task=task, group=group, sample=sample, seed=derived_seed(seed, group))
        for group, task in enumerate(tasks)
        for sample in range(samples)
    ]


def summarize(
    episodes: Sequence[Episode],
    *,
    ks: Sequence[int] = (1,),
    group_by: Sequence[str] = ("family",),
    passing_reward: float = PASSING_REWARD,
) -> Evaluation:
    """Rates and counts of episodes; those of a group are samples of one task.

    group_by: metadata whose values get a pass@1 of their own.

    Raises:
        ValueError: no episode is valid, or no task has k valid episodes; the reason is named.
    """
    valid = [episode for episode in episodes if episode.is_valid]
    if not valid:
        raise ValueError(_nothing_to_rate(episodes))
    by_task: dict[int, list[Episode]] = defaultdict(list)
    for episode in valid:
        by_task[episode.group].append(episode)
    passed = [
        [passes(episode, passing_reward=passing_reward) for episode in task]
        for task in by_task.values()
    ]
    return Evaluation(
        pass_at={k: _rate_at(passed, k=k) for k in ks},
        mean_reward=sum(episode.reward for episode in valid) / len(valid),
        num_tasks=len(by_task),
        num_episodes=len(valid),
        num_failed=len(episodes) - len(valid),
        num_truncated=sum(episode.is_truncated for episode in valid),
        num_sampled=sum(episode.num_sampled for episode in valid),
        groups=_by_metadata(list(by_task.values()), passed, names=group_by),
    )


def _rate_at(passes: Sequence[Sequence[bool]], *, k: int) -> Rate:
    """pass@k over the tasks that have enough samples."""
    values = [
        pass_at_k(samples=len(task), passed=sum(task), k=k) for task in passes if len(task) >= k
    ]
    if not values:
        most = max(map(len, passes))
        raise ValueError(
            f"pass@{k} needs {k} valid episodes of a task, but no task has more than {most}: take "
            f"more samples, or ask for k up to {most}."
        )
    if k == 1 or set(values) in ({0.0}, {1.0}):  # no resampling of equal tasks shows a doubt
        return wilson_interval(sum(values) / len(values), draws=len(values))
    return bootstrap_interval(values)


def _by_metadata(
    tasks: Sequence[Sequence[Episode]], passes: Sequence[Sequence[bool]], *, names: Sequence[str]
) -> dict[str, Rate]:
    members: dict[str, list[Sequence[bool]]] = defaultdict(list)
    for task, passed in zip(tasks, passes, strict=True):
        for name in names:
            if name in task[0].metadata:
                members[f"{name}={task[0].metadata[name]}"].append(passed)
    return {value: _rate_at(members[value], k=1) for value in sorted(members)}


def _nothing_to_rate(episodes: Sequence[Episode]) -> str:
    if not episodes:
        return "there is no episode to rate: the list of tasks is empty."
    return (
        f"all {len(episodes)} episodes failed, so there is nothing to rate; the first one: "
        f"{episodes[0].error}"
    )
