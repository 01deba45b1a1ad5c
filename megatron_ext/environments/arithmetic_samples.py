"""Demonstrations of the built-in tasks as training samples, drawn when they are asked for.

Invariant the tests check: a sample is a function of seed and place; only what the policy would say
is trained, and no held-out task is among them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import overload

from megatron_ext.environments.arithmetic_demonstrations import draw_demonstration
from megatron_ext.packing.batch import Sample


class DemonstrationSamples(Sequence[Sample]):
    """A fixed number of demonstrations."""

    def __init__(self, *, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed

    @property
    def identity(self) -> str:
        """What a resumed run knows them by."""
        return f"{self._count} arithmetic demonstrations, seed {self._seed}"

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        places = range(self._count)[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        episode = draw_demonstration(random.Random(f"demonstration {self._seed} {places}"))
        sample = episode.to_sample()
        return Sample(tokens=sample.tokens, mask=sample.mask, turn_ids=sample.turn_ids)
