"""Which tasks training never sees: a property of a task's text, the same everywhere."""

from __future__ import annotations

import hashlib

HELD_OUT_IN = 5
"""One text in so many is held out."""


def is_held_out(text: str) -> bool:
    """Whether a task with this text is kept from training.

    By md5, not crc32: the checksums of short, similar texts are so alike that the split is skewed.
    """
    return hashlib.md5(text.encode(), usedforsecurity=False).digest()[0] % HELD_OUT_IN == 0
