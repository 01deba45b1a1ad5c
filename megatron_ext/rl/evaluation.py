"""Held-out tasks during training: greedy and sampled pass rates, with intervals.

Invariant the tests check: an evaluation changes nothing of the run, and its numbers are the same on
every layout and for every number of steps before it, as long as the weights are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.environments.base import Task
from megatron_ext.environments.episode import Episode
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.environments.seeds import derived_seed
from megatron_ext.evaluation.tasks import Evaluation, evaluation_starts, summarize
from megatron_ext.report.metrics import NONFINITE_SUFFIX
from megatron_ext.rl.phases import Phases
from megatron_ext.rl.policy import Policy
from megatron_ext.rl.rollouts import play
from megatron_ext.rl.stop import Stop

logger = logging.getLogger(__name__)

_STREAM = 1
"""Keeps seeds of evaluations apart from those of training."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """The same tasks with the same seeds, whenever it is asked."""

    greedy: EpisodeRunner
    sampled: EpisodeRunner
    tasks: Sequence[Task]
    samples: int
    """Sampled episodes of each task."""
    seed: int

    def __call__(
        self, policy: Policy, *, version: int, stop: Stop | None = None
    ) -> tuple[dict[str, float], list[Episode]]:
        """Metrics, and all episodes.  Collective; the same on every rank.

        Raises:
            StepDropped: a rank was told to end meanwhile.
        """
        phases = Phases()
        found: dict[str, float] = {}
        kept: list[Episode] = []
        for runner, samples, end in (
            (self.greedy, 1, ""),
            (self.sampled, self.samples, "_sampled"),
        ):
            starts = evaluation_starts(
                self.tasks, samples=samples, seed=derived_seed(self.seed, _STREAM)
            )
            episodes = play(policy, runner, starts, version=version, phases=phases, stop=stop)
            kept += episodes
            found |= _metrics(episodes, samples=samples, end=end, is_writer=policy.is_writer)
        return found | {"eval_seconds": phases.metrics()["seconds"]}, kept


def _metrics(
    episodes: Sequence[Episode], *, samples: int, end: str, is_writer: bool
) -> dict[str, float]:
    """Pass rates with intervals, of all tasks and of each family; none if every episode failed."""
    try:
        result = summarize(episodes, ks=(1, samples) if samples > 1 else (1,))
    except ValueError as error:
        if is_writer:
            logger.warning("nothing to evaluate: %s", error)
        return {f"eval_failed_episodes{end}": len(episodes)}
    return _named(result, end=end)


def _named(result: Evaluation, *, end: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for k, rate in result.pass_at.items():
        name = f"eval_pass_rate{end}" if k == 1 else f"eval_pass_at_{k}{end}"
        found |= {name: rate.value, f"{name}_low": rate.low, f"{name}_high": rate.high}
    for group, rate in result.groups.items():
        # behind a slash: a task's own word must not become one of our names
        word = group.partition("=")[2].replace(NONFINITE_SUFFIX, "-nonfinite")
        found[f"eval_pass_rate{end}/{word}"] = rate.value
    return found | {
        f"eval_failed_episodes{end}": result.num_failed,
        f"eval_truncated_share{end}": result.num_truncated / result.num_episodes,
        f"eval_response_tokens{end}": result.num_sampled / result.num_episodes,
    }
