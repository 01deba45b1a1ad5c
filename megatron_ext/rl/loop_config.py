"""How much is rolled out, trained and evaluated in a reinforcement-learning run.

--global-batch-size counts episodes: a step rolls out that many, in groups of --group-size.
No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass

from megatron_ext.options.ranges import Ranged, ranged


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Ranged):
    """Rollout batches, updates on them, evaluations between them, and what is kept of all this."""

    group_size: int = ranged(8, at_least=1)
    """Episodes of each prompt; a step has --global-batch-size episodes, so that many divided by
    this of prompts."""

    batch_epochs: int = ranged(1, at_least=1)
    """Number of passes over a rollout batch; the old policy is the same in all of them."""

    minibatches: int = ranged(1, at_least=1)
    """Updates in one pass over a rollout batch, each on its share of the episodes."""

    shuffle_rewards: bool = False
    """Control experiment: give each episode of a step the reward of another one, drawn at random.
    A policy that still improves does not learn from rewards. Off by default."""

    eval_every: int = ranged(0, at_least=0)
    """Steps between two evaluations on held-out tasks, greedy and sampled; there is also one before
    the first step and one after the last. 0 = none."""

    eval_count: int = ranged(128, at_least=1)
    """Number of held-out tasks of an evaluation."""

    eval_samples: int = ranged(1, at_least=1)
    """Sampled episodes of each held-out task, for pass@k up to this k, beside the greedy one."""

    rollouts_per_step: int = ranged(8, at_least=0)
    """Episodes of each step that are written to rollouts.jsonl in --output-dir; 0 = none."""

    rollouts_megabytes: float = ranged(64.0, at_least=0, at_most=1e9)
    """Size in units of 10^6 bytes at which rollouts.jsonl stops growing; evaluations.jsonl has the
    same."""

    @property
    def updates_per_batch(self) -> int:
        """Updates on one rollout batch."""
        return self.batch_epochs * self.minibatches

    def problems(self, *, global_batch_size: int | None) -> list[str]:
        """What is wrong with the values, one sentence each."""
        found: list[str] = []
        if global_batch_size is None:
            return found
        if global_batch_size % self.group_size:
            low = global_batch_size // self.group_size * self.group_size
            found.append(
                f"--global-batch-size {global_batch_size} (episodes of a step) is not a multiple "
                f"of --group-size {self.group_size}: every prompt has a whole group. Use "
                f"{low or self.group_size} or {low + self.group_size}."
            )
        if self.minibatches > global_batch_size:
            found.append(
                f"--minibatches {self.minibatches} is more than the --global-batch-size "
                f"{global_batch_size} episodes of a step: use at most that many."
            )
        return found
