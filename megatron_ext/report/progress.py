"""Progress on stderr: a bar on a terminal, else a plain line every few seconds.

Both show the step, loss, gradient norm, tokens per second and the time left; of reinforcement
learning also the reward and the gap between sampler and trainer.  Like the bar, the plain lines go
to the stream itself: they are the display of a run, seen without any logging set-up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TextIO

from tqdm import tqdm

from megatron_ext.report.sink import Number, Outcome, Sink

_KEYS = (
    ("reward_mean", "reward", 4),
    ("loss", "loss", 4),
    ("grad_norm", "grad norm", 4),
    ("sampler_gap", "gap", 2),
)
"""Metric, its label, and its digits."""


def open_progress(
    total_steps: int | None,
    *,
    start_step: int,
    interval_seconds: float,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Sink:
    """The display that suits the stream (None = stderr).  start_step: steps done before."""
    shown_on: TextIO = sys.stderr if stream is None else stream
    if shown_on.isatty():
        return TerminalBar(total_steps, start_step=start_step, stream=shown_on)
    return PlainLines(
        total_steps,
        interval_seconds=interval_seconds,
        stream=shown_on,
        clock=clock,
    )


def key_figures(metrics: Mapping[str, Number]) -> str:
    """The figures one looks at first, as far as they were measured, and tokens per second."""
    shown = [
        f"{label} {metrics[name]:.{digits}g}" for name, label, digits in _KEYS if name in metrics
    ]
    if "tokens_per_second" in metrics:
        shown.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(shown)


class TerminalBar:
    """A bar that redraws itself in place."""

    place = "the terminal"

    def __init__(self, total_steps: int | None, *, start_step: int, stream: TextIO) -> None:
        self._bar = tqdm(
            total=total_steps, initial=start_step, file=stream, unit="step", dynamic_ncols=True
        )

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        self._bar.set_postfix_str(key_figures(metrics), refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self, outcome: Outcome) -> None:
        self._bar.close()


class PlainLines:
    """A line for the first and the last step, and between them at most one an interval."""

    place = "stderr"

    def __init__(
        self,
        total_steps: int | None,
        *,
        interval_seconds: float,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._interval_seconds = interval_seconds
        self._stream = stream
        self._clock = clock
        self._first: tuple[int, float] | None = (
            None  # step and time; the first step is slow: not timed
        )
        self._next_time = float("-inf")
        self._pending = ""

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        now = self._clock()
        self._pending = self._line(step, metrics, now=now)
        self._first = self._first or (step, now)
        if now >= self._next_time:
            self._next_time = now + self._interval_seconds
            self._show()

    def close(self, outcome: Outcome) -> None:
        self._show()

    def _show(self) -> None:
        if self._pending:
            self._stream.write(self._pending + "\n")
            self._stream.flush()
        self._pending = ""

    def _line(self, step: int, metrics: Mapping[str, Number], *, now: float) -> str:
        total = self._total_steps
        words = [f"step {step}" if total is None else f"step {step}/{total}", key_figures(metrics)]
        if total is not None and self._first is not None:
            first_step, first_time = self._first
            left = (total - step) * (now - first_time) / (step - first_step)
            words.append(f"{timedelta(seconds=max(round(left), 0))} left")
        return "  ".join(word for word in words if word)
