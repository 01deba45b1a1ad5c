"""Options of tasks and environments.

No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass

from megatron_ext.environments.base import EpisodeLimits


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
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

    task_seed: int = 0
    """Seed, any whole number, of the order of tasks, and of the tasks themselves where they are
    generated."""

    max_turns: int = 0
    """Turns of the policy in an episode; 0 = no limit."""

    max_turn_tokens: int = 0
    """Tokens of one turn of the policy; 0 = no limit but the episode's."""

    environment_workers: int = 4
    """Number of threads in which environments answer and verifiers grade, unless they do so at
    once."""

    environment_time_limit: float = 60.0
    """Seconds an environment may take for one answer, after which its episode counts for nothing;
    keep it above what a verifier may take."""

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        found = [
            f"--{name} {value} is negative: give a number, or 0 for no limit."
            for name, value in (
                ("max-turns", self.max_turns),
                ("max-turn-tokens", self.max_turn_tokens),
            )
            if value < 0
        ]
        found += [
            f"--{name} {value} leaves no environment to answer: give a number above 0."
            for name, value in (
                ("environment-workers", self.environment_workers),
                ("environment-time-limit", self.environment_time_limit),
            )
            if not value > 0
        ]
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
