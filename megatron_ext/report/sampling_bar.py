"""A bar of finished sequences, with tokens per second, for tools that only sample."""

from __future__ import annotations

import time
from types import TracebackType

from tqdm import tqdm


class SamplingBar:
    """Progress on stderr; use as a context manager."""

    def __init__(self, *, total: int, unit: str, is_shown: bool) -> None:
        self._bar = tqdm(total=total, unit=unit, disable=not is_shown, leave=False)
        self._started = time.perf_counter()
        self._num_tokens = 0

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._started

    def add(self, num_tokens: int, *, also: str = "") -> None:
        """One more is finished, with so many sampled tokens; also: shown behind the speed."""
        self._num_tokens += num_tokens
        speed = f"{self._num_tokens / self.seconds:.0f} tokens/s"
        self._bar.set_postfix_str(f"{speed}, {also}" if also else speed, refresh=False)
        self._bar.update()

    def __enter__(self) -> SamplingBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
