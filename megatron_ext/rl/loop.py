"""The loop of every algorithm: roll out, score, learn, and the next rollout has the new weights.

    loop = ReinforcementLoop(policy=policy, source=source, ...)
    metrics = loop.step(7, consumed=768)        # collective, the same on every rank but for clocks

A step depends on the weights, the run's seed and its place in the sequence of tasks, and on nothing
else: a run that was killed, in a rollout too, does the same step again after it resumed.
Invariant the tests check: the episodes of a step are trained in that step, once, or counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.environments.base import TaskSource
from megatron_ext.environments.calls import TimedCalls
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.environments.seeds import derived_seed
from megatron_ext.rl.config import AlgorithmConfig
from megatron_ext.rl.evaluation import Evaluator
from megatron_ext.rl.learning import Planner, learn
from megatron_ext.rl.loop_config import LoopConfig
from megatron_ext.rl.phases import Phases
from megatron_ext.rl.policy import Policy
from megatron_ext.rl.rollouts import play, step_starts, with_shuffled_rewards
from megatron_ext.rl.step_metrics import learning_metrics, rollout_metrics
from megatron_ext.rl.stop import NeverStops, StepDropped, Stop
from megatron_ext.rl.transcripts import Transcripts
from megatron_ext.rl.watch import Watch


@dataclass(frozen=True, kw_only=True)
class ReinforcementLoop:
    """A run's parts; the loop over steps, checkpoints and metrics is the caller's."""

    policy: Policy
    source: TaskSource
    runner: EpisodeRunner
    evaluator: Evaluator | None
    algorithm: AlgorithmConfig
    config: LoopConfig
    planner: Planner
    watch: Watch
    transcripts: Transcripts
    batch_size: int
    """Episodes of a step."""
    max_response_tokens: int
    seed: int
    stop: Stop = field(default_factory=NeverStops)
    timed_calls: TimedCalls | None = None
    """The threads of the runners; None = environments are called in place."""

    def close(self) -> None:
        """End the threads of the environments."""
        if self.timed_calls is not None:
            self.timed_calls.close()

    def step(self, number: int, *, consumed: int) -> dict[str, float]:
        """One step; `number` counts from 1, `consumed` are the episodes before it.  Collective.

        Raises:
            StepDropped: the run is to end, and the step has changed nothing.
        """
        phases = Phases()
        size = self.config.group_size
        starts = step_starts(
            self.source,
            first_group=consumed // size,
            num_groups=self.batch_size // size,
            group_size=size,
            seed=self.seed,
        )
        episodes = play(
            self.policy, self.runner, starts, version=number - 1, phases=phases, stop=self.stop
        )
        phases.seconds["reward"] = sum(e.environment_seconds for e in episodes)
        found = rollout_metrics(episodes)
        if self.config.shuffle_rewards:
            episodes = with_shuffled_rewards(episodes, seed=derived_seed(self.seed, number, 2))
        learned = learn(
            self.policy,
            episodes,
            algorithm=self.algorithm,
            loop=self.config,
            planner=self.planner,
            max_response_tokens=self.max_response_tokens,
            phases=phases,
            stop=self.stop,
        )
        self.transcripts.add_rollouts(number, episodes, advantages=learned.scored.advantages_E)
        self.watch(number, learned)
        return found | learning_metrics(learned) | phases.metrics()

    def evaluate(self, number: int) -> dict[str, float]:
        """Held-out pass rates after `number` steps.  Collective.

        Nothing without an evaluator, or if the run is to end before they are known.
        """
        if self.evaluator is None:
            return {}
        try:
            found, episodes = self.evaluator(self.policy, version=number, stop=self.stop)
        except StepDropped:
            return {}
        self.transcripts.add_evaluation(number, episodes)
        return found

    def is_evaluated(self, number: int, *, last: int) -> bool:
        """Whether there is an evaluation after `number` of `last` steps."""
        every = self.config.eval_every
        return every > 0 and (number % every == 0 or number == last)
