"""Options of the verifiers.

No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass

from megatron_ext.options.ranges import Ranged, ranged


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Ranged):
    """How answers are checked."""

    math_workers: int = ranged(2, at_least=1, at_most=1024)
    """Processes that check mathematical answers; each uses one core and about 100 MB. They start
    with the first answer that needs them."""

    math_time_limit: float = ranged(3.0, above=0, at_most=1e6)
    """CPU seconds one mathematical answer may take, after which it is worth nothing; it is also
    stopped after four times as many seconds on the clock."""

    math_memory_limit: int = ranged(1024, at_least=1)
    """Number of MiB one mathematical answer may add to its process, after which it is worth
    nothing."""
