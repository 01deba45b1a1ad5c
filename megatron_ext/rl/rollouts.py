"""The episodes of a step: which ones, who plays them, and all of them on every rank.

A step's prompts are the next places of the source's sequence, dealt to the replicas in turn, so
that a group stays on one replica.  Seeds come from the run's seed and the place: what is sampled
depends on nothing else, not on the layout, and not on whether the run was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_ext.environments.base import EpisodeStart, TaskSource
from megatron_ext.environments.episode import Episode
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.environments.seeds import derived_seed
from megatron_ext.rl.phases import Phases
from megatron_ext.rl.policy import Policy
from megatron_ext.rl.stop import NeverStops, StepDropped, Stop, StoppableGenerator
from megatron_ext.rollout.session import RolloutSession


def step_starts(
    source: TaskSource, *, first_group: int, num_groups: int, group_size: int, seed: int
) -> list[EpisodeStart]:
    """The episodes of a step, group by group; groups are numbered over the whole run."""
    return [
        EpisodeStart(task=task, group=group, sample=sample, seed=derived_seed(seed, group))
        for group in range(first_group, first_group + num_groups)
        for task in [source.train(group)]
        for sample in range(group_size)
    ]


def play(
    policy: Policy,
    runner: EpisodeRunner,
    starts: Sequence[EpisodeStart],
    *,
    version: int,
    phases: Phases,
    stop: Stop | None = None,
) -> list[Episode]:
    """Episodes of all starts, in their order, on every rank; each replica plays whole groups.

    Raises:
        StepDropped: on every rank, if one of them was told to end meanwhile.
    """
    watched = NeverStops() if stop is None else stop

    def drive(session: RolloutSession) -> list[Episode] | None:
        try:
            return runner.run(StoppableGenerator(session, watched), mine)
        except StepDropped:
            return None

    places = {group: i for i, group in enumerate(dict.fromkeys(s.group for s in starts))}
    mine = [s for s in starts if places[s.group] % policy.dp_size == policy.dp_rank]
    with phases.phase("rollout"):
        played = policy.engine.run(drive, version=version)
    with phases.phase("sync"):
        parts = policy.gather([played])
    found = [episode for part in parts if part is not None for episode in part]
    if None in parts:
        raise StepDropped
    phases.count("rollout", sum(episode.num_sampled for episode in found))
    return sorted(found, key=lambda episode: (places[episode.group], episode.sample))


def with_shuffled_rewards(episodes: Sequence[Episode], *, seed: int) -> list[Episode]:
    """The episodes with the rewards of the valid ones permuted: a control without a signal."""
    places = [i for i, episode in enumerate(episodes) if episode.is_valid]
    generator = torch.Generator().manual_seed(seed % 2**63)
    order = torch.randperm(len(places), generator=generator).tolist()
    given = {
        place: episodes[places[other]].reward for place, other in zip(places, order, strict=True)
    }
    return [replace(e, reward=given.get(i, e.reward)) for i, e in enumerate(episodes)]
