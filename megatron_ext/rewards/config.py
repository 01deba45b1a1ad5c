"""Options of the verifiers.

No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How answers are checked."""

    math_workers: int = 2
    """Processes that check mathematical answers; each uses one core and about 100 MB. They start
    with the first answer that needs them."""

    math_time_limit: float = 3.0
    """CPU seconds one mathematical answer may take, after which it is worth nothing; it is also
    stopped after four times as many seconds on the clock."""

    math_memory_limit: int = 1024
    """Number of MiB one mathematical answer may add to its process, after which it is worth
    nothing."""

    def problems(self) -> list[str]:
        """What is wrong with the values, one sentence each."""
        values = {
            "math-workers": self.math_workers,
            "math-time-limit": self.math_time_limit,
            "math-memory-limit": self.math_memory_limit,
        }
        return [
            f"--{name} {value} leaves nothing to check answers with: give a number above 0."
            for name, value in values.items()
            if not value > 0
        ]
