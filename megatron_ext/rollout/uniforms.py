"""Random numbers that depend on who draws them and nothing else.

Draw number i of stream (seed, sample) is a function of the three numbers (Philox, Salmon et al.
2011), so tokens do not change with the batch, the slot, the parallel layout or an interruption.
Invariant the tests check: any order of access gives the same numbers.
"""

from __future__ import annotations

import numpy as np

_BLOCK = 64
"""Numbers computed at a time; a multiple of Philox's 4 words a counter."""


class UniformStream:
    """Independent uniform numbers in [0, 1), addressed by their index."""

    __slots__ = ("_block", "_key", "_values")

    def __init__(self, *, seed: int, sample: int) -> None:
        self._key = np.array([seed, sample], dtype=np.uint64)
        self._block = -1
        self._values: list[float] = []

    def at(self, index: int) -> float:
        """Number `index` of the stream."""
        block, place = divmod(index, _BLOCK)
        if block != self._block:
            generator = np.random.Philox(key=self._key, counter=block * (_BLOCK // 4))
            words = generator.random_raw(_BLOCK) >> np.uint64(11)
            self._values, self._block = (words * 2.0**-53).tolist(), block
        return self._values[place]
