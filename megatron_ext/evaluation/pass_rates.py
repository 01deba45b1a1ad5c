"""pass@1 and pass@k with confidence intervals.

pass@k is the unbiased estimate of Chen et al. 2021 (eq. 1).  Its uncertainty comes from which tasks
were asked, so intervals treat tasks, not samples, as the independent draws: Wilson's for pass@1
(which for several samples a task is on the safe side), the bootstrap over tasks for k > 1, unless
all tasks are solved or none is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt
from statistics import NormalDist

import torch

BOOTSTRAP_DRAWS = 2000
_ELEMENTS = 500_000  # drawn at a time


@dataclass(frozen=True, kw_only=True)
class Rate:
    """An estimate between 0 and 1 with its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(*, samples: int, passed: int, k: int) -> float:
    """Probability that at least one of k samples, drawn from these without replacement, passes."""
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ValueError(
            f"pass@{k} of {samples} samples with {passed} passed: 1 <= k <= samples and "
            "0 <= passed <= samples are needed. Take at least k samples of each task."
        )
    failed = samples - passed
    if failed < k:
        return 1.0
    return 1.0 - prod(1.0 - k / n for n in range(failed + 1, samples + 1))


def wilson_interval(value: float, *, draws: int, confidence: float = 0.95) -> Rate:
    """A proportion of so many independent draws, with Wilson's score interval (1927)."""
    if draws < 1 or not 0 <= value <= 1:
        raise ValueError(
            f"a rate of {value} over {draws} tasks has no interval: there must be a task, and the "
            "rate lies between 0 and 1."
        )
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = z * z / draws
    center = (value + share / 2) / (1 + share)
    half = z * sqrt(value * (1 - value) / draws + share / draws / 4) / (1 + share)
    low, high = max(0.0, center - half), min(1.0, center + half)
    return Rate(value=value, low=min(low, value), high=max(high, value))


def bootstrap_interval(values: Sequence[float], *, confidence: float = 0.95, seed: int = 0) -> Rate:
    """The mean of values, with the percentile bootstrap interval over them; same seed, same one."""
    if not values:
        raise ValueError("the mean of no values has no interval: there must be a task.")
    column = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, _ELEMENTS // len(values))
    means = torch.cat(
        [
            _resampled(column, count=min(rows, BOOTSTRAP_DRAWS - start), generator=generator)
            for start in range(0, BOOTSTRAP_DRAWS, rows)
        ]
    )
    tails = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = means.quantile(tails).tolist()
    mean = float(column.mean())
    return Rate(value=mean, low=min(low, mean), high=max(high, mean))


def _resampled(column: torch.Tensor, *, count: int, generator: torch.Generator) -> torch.Tensor:
    """Means of `count` samples with replacement."""
    picks = torch.randint(len(column), (count, len(column)), generator=generator)
    return column[picks].mean(dim=1)
