"""Options of tasks and environments.

No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass

from megatron_ext.environments.base import EpisodeLimits
from megatron_ext.options.ranges import Ranged, ranged


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Ranged):
    """What is practised and tested, and where episodes are cut."""

    tasks: str = "arithmetic"
    """Tasks to train on: arithmetic (built in, with a calculator and its own tokenizer), the path
    of a JSONL file, gsm8k:FILE for a file in GSM8K's own format, or reasoning-gym:NAME for a data
    set of that library."""

    eval_tasks: str | None = None
    """File of held-out tasks (JSONL, or gsm8k:FILE), for --tasks from a file; the other kinds hold
    out one task in five by themselves. Unset = no held-out tasks."""

    tasks_as_chat: bool = False
    """Ask plain prompts as the user's message of a chat, by the tokenizer's chat template.
    Off: as they are."""

    task_seed: int = ranged(0, at_least=-(2**63), at_most=2**63 - 1)
    """Seed, a number of 64 bits, of the order of tasks, and of the tasks themselves where they are
    generated."""

    max_turns: int = ranged(0, at_least=0, note="0 = no limit")
    """Turns of the policy in an episode; 0 = no limit."""

    max_turn_tokens: int = ranged(0, at_least=0, note="0 = no limit")
    """Tokens of one turn of the policy; 0 = no limit but the episode's."""

    environment_workers: int = ranged(4, at_least=1, at_most=4096)
    """Number of threads in which environments answer and verifiers grade, unless they do so at
    once."""

    environment_time_limit: float = ranged(60.0, above=0, at_most=1e9)
    """Seconds an environment may take for one answer, after which its episode counts for nothing;
    keep it above what a verifier may take."""

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        found = []
        if self.eval_tasks is not None and not self.is_file:
            found.append(
                f"--eval-tasks {self.eval_tasks} has no effect with --tasks {self.tasks}, which "
                "holds out tasks of its own. Drop it."
            )
        return found

    def limits(self, *, max_new_tokens: int, max_context: int) -> EpisodeLimits:
        """Where episodes are cut, with the rollout's budget and the model's context."""
        return EpisodeLimits(
            max_new_tokens=max_new_tokens,
            max_context=max_context,
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
        )

    @property
    def is_file(self) -> bool:
        """Whether the tasks come from a file."""
        return self.tasks != "arithmetic" and not self.tasks.startswith("reasoning-gym:")
