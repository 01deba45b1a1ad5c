"""In which order samples are seen: a function of seed and position, so that a resumed run goes on.

Every epoch is its own permutation; a step takes the next ``global_batch_size`` positions.
Invariant the tests check: each epoch has every sample once; order(k) never depends on how one got
to k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_samples, generator=generator).tolist()


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """An endless, seeded sequence of sample indices."""

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("there is no sample to train on: the data set is empty.")

    def take(self, start: int, count: int) -> list[int]:
        """Sample indices at positions ``start`` to ``start + count - 1`` of the sequence."""
        indices = []
        for position in range(start, start + count):
            epoch, offset = divmod(position, self.num_samples)
            indices.append(_permutation(self.num_samples, self.seed, epoch)[offset])
        return indices
