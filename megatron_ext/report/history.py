"""The metrics of a run in memory, and the few numbers a page shows of them.

Invariants: an envelope of a series keeps its lowest and highest finite value; a series that is
short enough is its own envelope; values that are not finite are gaps in a curve, but are counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_ext.report.sink import Number


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values of one metric at the steps where it was logged."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))


class History:
    """Every metric's series, in the order in which the metrics first appeared."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.first_step: int | None = None
        self.last_step: int | None = None

    def add(self, step: int, metrics: Mapping[str, Number]) -> None:
        for name, value in metrics.items():
            series = self.series.setdefault(name, Series())
            series.steps.append(step)
            series.values.append(value)
        if self.first_step is None:
            self.first_step = step
        self.last_step = step


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Key figures of a series; lowest and highest are of its finite values, None without any."""

    first: float
    last: float
    lowest: tuple[float, int] | None
    """(value, the step where it was first reached)"""
    highest: tuple[float, int] | None
    """(value, the step where it was first reached)"""
    num_nonfinite: int
    first_nonfinite_step: int | None


def summarise(series: Series) -> Summary:
    """Key figures of a series of at least one value."""
    steps, values = np.asarray(series.steps), np.asarray(series.values)
    finite = np.isfinite(values)
    lowest = highest = None
    if finite.any():
        at_lowest = int(np.where(finite, values, np.inf).argmin())
        at_highest = int(np.where(finite, values, -np.inf).argmax())
        lowest = (float(values[at_lowest]), int(steps[at_lowest]))
        highest = (float(values[at_highest]), int(steps[at_highest]))
    return Summary(
        first=float(values[0]),
        last=float(values[-1]),
        lowest=lowest,
        highest=highest,
        num_nonfinite=int((~finite).sum()),
        first_nonfinite_step=None if finite.all() else int(steps[(~finite).argmax()]),
    )


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A curve to draw: at each step the lowest, mean and highest value nearby; NaN is a gap."""

    steps: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    is_exact: bool
    """Whether every logged value is a point of the curve (then low, mean and high are the same)."""


def envelope(series: Series, *, max_points: int, unit: float = 1.0) -> Envelope:
    """The series in at most `max_points` points, each for the same number of logged values.

    unit: what the values are divided by.
    """
    steps, values = np.array(series.steps, dtype=float), np.array(series.values) / unit
    finite = np.isfinite(values)
    if len(values) <= max_points:
        curve = np.where(finite, values, np.nan)
        return Envelope(steps=steps, low=curve, mean=curve, high=curve, is_exact=True)
    starts = np.arange(max_points) * len(values) // max_points
    sizes = np.diff(starts, append=len(values))
    num_finite = np.add.reduceat(finite.astype(int), starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    share = np.where(finite, values, 0.0) / np.maximum(num_finite, 1).repeat(sizes)
    mean = np.add.reduceat(share, starts).clip(low, np.maximum(low, high))  # clip: rounding only
    is_gap = num_finite == 0
    return Envelope(
        steps=np.add.reduceat(steps, starts) / sizes,
        low=np.where(is_gap, np.nan, low),
        mean=np.where(is_gap, np.nan, mean),
        high=np.where(is_gap, np.nan, high),
        is_exact=False,
    )
