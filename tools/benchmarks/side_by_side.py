"""Several ways to do the same work, timed in turns in one process.

Times are CPU seconds of this process (one thread), so that other load on the machine counts little;
on an idle machine they are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

Step = Callable[[], object]


def seconds_of(ways: Mapping[str, Sequence[Step]]) -> dict[str, float]:
    """CPU seconds of all steps of each way; the first of each runs once before, untimed.

    The ways take turns, a step each, so that a slow moment of the machine meets all of them.
    """
    for steps in ways.values():
        steps[0]()
    seconds = dict.fromkeys(ways, 0.0)
    for turn in zip(*ways.values(), strict=True):
        for name, step in zip(ways, turn, strict=True):
            started = time.process_time()
            step()
            seconds[name] += time.process_time() - started
    return seconds
