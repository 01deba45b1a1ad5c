"""How long the phases of a step take, and the speed at which each goes through its tokens."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds by phase; a phase that comes twice is added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._tokens: dict[str, int] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def count(self, name: str, tokens: int) -> None:
        """Tokens that a phase went through."""
        self._tokens[name] = self._tokens.get(name, 0) + tokens

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase, tokens per second where tokens were counted, and all seconds."""
        found = {f"{name}_seconds": value for name, value in self.seconds.items()}
        found |= {
            f"{name}_tokens_per_second": tokens / self.seconds[name]
            for name, tokens in self._tokens.items()
            if self.seconds[name] > 0
        }
        return found | {"seconds": time.perf_counter() - self._started}
